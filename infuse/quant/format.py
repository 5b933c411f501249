"""QuantFormat, the interface of number formats, and QuantizedWeight, the result of quantizing.

The arithmetic of each family is in its own file (integer.py, floating.py). Nothing here depends
on modules, kernels or models.

Legend: weights are [out_features, in_features]; a group is a run of neighbouring inputs of one row that share a scale.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from infuse.errors import ConfigError

POSSIBLE = (
    "int8, int8:GROUP, int8:row, int8:groups=N; int4, fp8, fp6 likewise; int8 and int4 also with :symmetric or "
    ":asymmetric behind, and with :a8, which lets products of many tokens round activations to 8 bits; mxfp4"
)

# Scales are bfloat16: a step that is off by 0.2 % costs nothing if codes are rounded against the stored step. In
# float16, groups whose largest value is below 4e-4 (int4) or 8e-3 (int8) would fall into the subnormals; float32 would
# cost two more bytes per group. With bfloat16's 8 significant bits, scale * code is also exact in float32.
SCALE_DTYPE = torch.bfloat16
# Scale of all-zero groups. It is normal, so 1 / scale stays finite in flush-to-zero modes.
SMALLEST_SCALE = 2.0**-126

LARGEST_WEIGHT = 2.0**126  # 8.5e37; beyond it, code times a rounded scale could overflow float32
CPU_BLOCK_VALUES = 1 << 17  # a block and two temporaries fit in a core's cache
DEVICE_BLOCK_VALUES = 1 << 24  # other devices need few, large launches; 64 MiB per temporary
ERROR_LENGTHS = (16, 32, 64, 128, 256, 1024, 4096, 16384)  # group lengths at which each family measured its errors

# A proof accepts up to this many times the error on normal weights: heavier tails fill their groups worse.
# Measured in groups of 64: Laplace weights have 1.24 to 1.32 times, Student-t(3) 1.46 to 1.85 times the relative error
# of normal ones.
TAIL_FACTOR = 2.0

# Why inputs come in multiples of QuantFormat.pack.
_SHARED = {2: "two values share a byte", 4: "four values share three bytes"}
_MULTIPLE = {2: "even", 4: "a multiple of 4"}


@dataclass(frozen=True)
class QuantFormat(ABC):
    """How the numbers of a weight matrix are stored: pure data that a plan can hold, compare, print and pickle.

    `group_size` inputs share a scale; None means the whole row or, if `groups` is set, one `groups`-th of it. With
    `activation_bits` = 8, products may round their input, each group of inputs by its own largest value; weights are
    stored the same way. `str(format)` is canonical: `quant_format(str(format)) == format`.
    """

    name: str
    bits: int
    group_size: int | None
    symmetric: bool = True
    groups: int | None = None
    activation_bits: int = 16

    def __post_init__(self) -> None:
        assert self.group_size is None or self.groups is None
        for what, number in (("group size", self.group_size), ("number of groups", self.groups)):
            if number is not None and number < 1:
                raise ConfigError(f"{self.name}: the {what} is {number}; it must be at least 1")
        if self.group_size is not None and self.group_size % self.pack:
            raise ConfigError(
                f"{self.name}: {_SHARED[self.pack]}, so the group size must be {_MULTIPLE[self.pack]}, "
                f"not {self.group_size}"
            )

    @abstractmethod
    def _coded(self, w_GN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Encode float32 groups [G, N].

        Returns codes [G, N * bits / 8], scales [G, 1] and, if asymmetric, zeros [G, 1] as they are stored.
        """

    @abstractmethod
    def _nearest(self, w_GN: torch.Tensor, scale_G1: torch.Tensor, zero_G1: torch.Tensor | None) -> torch.Tensor:
        """Codes [G, N * bits / 8] of groups with known scales and stored zeros, both float32."""

    @abstractmethod
    def _values(self, data: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
        """Decode rows of codes to float32 values [R, in], in new memory."""

    @torch.no_grad()
    def quantize(self, weight: torch.Tensor) -> QuantizedWeight:
        """Quantize a floating weight [out, in] on any device; on meta, only the shapes are computed.

        Rows are independent, so a shard of rows quantizes to the shard of the codes. ConfigError for NaN, infinite or
        huge (above 8.5e37) values, for another number of dimensions or dtype, and for a width that `fits` declines.
        """
        if weight.dim() != 2 or not weight.is_floating_point():
            raise ConfigError(
                f"{self} quantizes floating matrices [out, in]; this is {weight.dtype} {list(weight.shape)}"
            )
        (rows, columns), groups = weight.shape, self.group_count(weight.shape[1])
        data = self._empty_codes(rows, columns, weight.device)
        scale = torch.empty(rows, groups, dtype=SCALE_DTYPE, device=weight.device)
        zero = None if self.symmetric else torch.empty(rows, groups, dtype=torch.int8, device=weight.device)
        if not weight.is_meta and weight.numel():
            for part in _row_blocks(weight):
                block = weight[part].float()
                _refuse_unstorable(block, part.start, weight)
                coded = self._coded(block.reshape(-1, columns // groups))
                for into, found in zip((data, scale, zero), coded, strict=True):
                    if into is not None and found is not None:
                        into[part] = found.reshape(len(block), -1)
        return QuantizedWeight(data, scale, zero, (rows, columns), self)

    @torch.no_grad()
    def dequantize(self, weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Decode to values [out, in]: exact in float32, rounded once for a narrower dtype."""
        assert weight.format == self, f"{weight.format} is not {self}"
        out = torch.empty(weight.shape, dtype=dtype, device=weight.data.device)
        if not out.is_meta and out.numel():
            for part in _row_blocks(out):
                zero = None if weight.zero is None else weight.zero[part]
                out[part] = self._values(weight.data[part], weight.scale[part], zero)
        return out

    @torch.no_grad()
    def codes(self, values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
        """Codes nearest to `values` [out, in] under these scales and zeros.

        The inverse of `dequantize`, even if that rounded to 16 bits.
        """
        rows, columns = values.shape
        data = self._empty_codes(rows, columns, values.device)
        for part in _row_blocks(values) if values.numel() else ():
            groups = values[part].float().reshape(-1, columns // scale.shape[1])
            zero_G1 = None if zero is None else zero[part].float().reshape(-1, 1)
            data[part] = self._nearest(groups, scale[part].float().reshape(-1, 1), zero_G1).reshape(len(data[part]), -1)
        return data

    def _empty_codes(self, rows: int, columns: int, device: torch.device) -> torch.Tensor:
        dtype = torch.int8 if self.name == "int8" else torch.uint8
        return torch.empty(rows, columns * self.bits // 8, dtype=dtype, device=device)

    def buffers(self, in_features: int) -> tuple[Buffer, ...]:
        """The tensors that store a weight with rows of `in_features`. ConfigError if `fits` declines."""
        groups = self.group_count(in_features)
        group = None if groups == 1 else in_features // max(groups, 1) or self.pack
        found = [
            Buffer("data", torch.int8 if self.name == "int8" else torch.uint8, self.pack, self.pack * self.bits // 8),
            Buffer("scale", SCALE_DTYPE, group),
        ]
        return (*found, *([] if self.symmetric else [Buffer("zero", torch.int8, group)]))

    def nbytes(self, out_features: int, in_features: int) -> int:
        """Bytes of a weight in this format, including scales and zeros. ConfigError if `fits` declines."""
        for_each_group = SCALE_DTYPE.itemsize + (0 if self.symmetric else 1)
        return out_features * (in_features * self.bits // 8 + self.group_count(in_features) * for_each_group)

    @property
    @abstractmethod
    def expected_error(self) -> float:
        """Relative RMS error of a round trip on normal weights, rms(w - w') / rms(w)."""

    @property
    def proof_tolerance(self) -> float:
        """Relative RMS error up to which a quantized layer passes the proof: expected_error * TAIL_FACTOR."""
        return self.expected_error * TAIL_FACTOR

    @property
    def pack(self) -> int:
        """Number of neighbouring inputs that share whole bytes: 1 (8 bits), 2 (4 bits) or 4 (6 bits)."""
        return 8 // math.gcd(8, self.bits)

    def fits(self, in_features: int) -> str | None:
        """None if rows of `in_features` can be stored in this format, else the reason with its numbers."""
        if in_features % self.pack:
            return f"{self}: {_SHARED[self.pack]}, and {in_features} inputs are not {_MULTIPLE[self.pack]}"
        if self.group_size is not None and in_features % self.group_size:
            divisors = [str(size) for size in (128, 64, 32) if in_features % size == 0 and size != self.group_size]
            would = " or ".join(divisors) if divisors else "row"
            return f"{self}: groups of {self.group_size} do not divide {in_features} inputs ({would} would)"
        if self.groups is not None and in_features % self.groups:
            return f"{self}: {in_features} inputs do not divide into {self.groups} groups"
        if self.groups is not None and (length := in_features // self.groups) % self.pack:
            each = f"{in_features} inputs in {self.groups} groups are {length} for each, not {_MULTIPLE[self.pack]}"
            return f"{self}: {_SHARED[self.pack]}, and {each}"
        return None

    def of_part(self, in_features: int) -> QuantFormat:
        """This format for parts of rows of `in_features`.

        Parts keep the group size of the whole row, so `groups=N` becomes a fixed group size.
        """
        if self.groups is None or in_features % self.groups:
            return self
        return replace(self, group_size=in_features // self.groups, groups=None)

    def group_count(self, in_features: int) -> int:
        """Number of groups, and thus scales, in a row of `in_features`. ConfigError if `fits` declines."""
        if reason := self.fits(in_features):
            raise ConfigError(reason)
        if in_features == 0:
            return 0
        if self.groups is not None:
            return self.groups
        return 1 if self.group_size is None else in_features // self.group_size


BUFFERS = ("data", "scale", "zero")  # the tensors of a QuantizedWeight


@dataclass(frozen=True)
class Buffer:
    """One of the tensors [out, width] that store a matrix [out, in]: `columns` for each `inputs` neighbouring inputs.

    `inputs` None: for a whole row.
    """

    name: str
    dtype: torch.dtype
    inputs: int | None
    columns: int = 1

    def width(self, in_features: int) -> int:
        """Its number of columns for rows of `in_features`."""
        if self.inputs is None:
            return self.columns if in_features else 0
        assert in_features % self.inputs == 0, (self, in_features)
        return in_features // self.inputs * self.columns

    def of_inputs(self, start: int, stop: int) -> slice:
        """Its columns for the inputs from `start` to `stop`, which must not cut what several inputs share."""
        if self.inputs is None:
            return slice(0, self.columns)
        return slice(self.width(start), self.width(stop))


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """The buffers of one quantized matrix; `format` gives their meaning. A plain container: it never computes."""

    data: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    shape: tuple[int, int]
    format: QuantFormat = field(repr=False)

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], format: QuantFormat) -> QuantizedWeight:
        """From the tensors of `format.buffers`, by name."""
        return cls(tensors["data"], tensors["scale"], tensors.get("zero"), shape, format)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of `format.buffers`, by name."""
        return {name: tensor for name in BUFFERS if (tensor := getattr(self, name)) is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(tensor.nbytes for tensor in (self.data, self.scale, self.zero) if tensor is not None)


def _row_blocks(matrix: torch.Tensor) -> Iterator[slice]:
    step = max(1, (CPU_BLOCK_VALUES if matrix.device.type == "cpu" else DEVICE_BLOCK_VALUES) // matrix.shape[1])
    return (slice(start, start + step) for start in range(0, matrix.shape[0], step))


def _refuse_unstorable(block: torch.Tensor, first_row: int, weight: torch.Tensor) -> None:
    lowest, highest = torch.aminmax(block)  # NaN propagates, and fails both comparisons
    if lowest.item() >= -LARGEST_WEIGHT and highest.item() <= LARGEST_WEIGHT:
        return
    row, column = torch.nonzero(~(block.abs() <= LARGEST_WEIGHT))[0].tolist()
    raise ConfigError(
        f"a weight {list(weight.shape)} holds {block[row, column].item()} at [{first_row + row}, {column}]; "
        f"NaN, infinite values and magnitudes above {LARGEST_WEIGHT:.2g} cannot be quantized"
    )
