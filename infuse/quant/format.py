"""QuantFormat, the interface of number formats, and QuantizedWeight, the result of quantizing.

The arithmetic of each format is in its own file (integer.py, floating.py, microscaling.py). Nothing here depends
on modules, kernels or models.

Legend: weights are [out_features, in_features]; w_RI are float32 rows of one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from infuse.ground.errors import ConfigError

LARGEST_WEIGHT = 2.0**126  # 8.5e37; beyond it, code times a rounded scale could overflow float32
CPU_BLOCK_VALUES = 1 << 17  # a block and two temporaries fit in a core's cache
DEVICE_BLOCK_VALUES = 1 << 24  # other devices need few, large launches; 64 MiB per temporary

# A proof accepts up to this many times the error on normal weights: heavier tails fill their groups worse.
# Measured in groups of 64: Laplace weights have 1.24 to 1.32 times, Student-t(3) 1.46 to 1.85 times the relative error
# of normal ones.
TAIL_FACTOR = 2.0


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
        """Its columns for inputs `start` to `stop`. The bounds must not separate inputs that share columns."""
        if self.inputs is None:
            return slice(0, self.columns)
        return slice(self.width(start), self.width(stop))


@dataclass(frozen=True)
class QuantFormat(ABC):
    """How the numbers of a weight matrix are stored: pure data that a plan can hold, compare, print and pickle.

    A format declares its buffers, and encodes and decodes rows; everything else follows. `bits` are those of a code.
    With `activation_bits` = 8, products may round their input; weights are stored the same way. `str(format)` is
    canonical: `quant_format(str(format)) == format`.
    """

    name: str
    bits: int
    activation_bits: int = field(default=16, kw_only=True)

    @abstractmethod
    def buffers(self, in_features: int) -> tuple[Buffer, ...]:
        """The tensors that store a weight with rows of `in_features`, codes first. ConfigError if `fits` declines."""

    @abstractmethod
    def encode(self, w_RI: torch.Tensor) -> Iterable[torch.Tensor]:
        """The rows of all buffers that store these float32 rows, in the order of `buffers`."""

    @abstractmethod
    def decode(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Values [R, in], in new memory, float32, of the same rows of all buffers."""

    @abstractmethod
    def fits(self, in_features: int) -> str | None:
        """None if rows of `in_features` can be stored in this format, else the reason with its numbers."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the buffers. They do not depend on the number of inputs."""
        return tuple(buffer.name for buffer in self.buffers(0))

    @property
    @abstractmethod
    def expected_error(self) -> float:
        """Relative RMS error of a round trip on normal weights, rms(w - w') / rms(w)."""

    @property
    def proof_tolerance(self) -> float:
        """Relative RMS error up to which a quantized layer passes the proof: expected_error * TAIL_FACTOR."""
        return self.expected_error * TAIL_FACTOR

    @property
    def largest_weight(self) -> float:
        """The largest magnitude that can be stored."""
        return LARGEST_WEIGHT

    @property
    def has_nearest(self) -> bool:
        """Whether `nearest` is implemented, so that values may stand in for codes."""
        return False

    def nearest(self, w_RI: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The first buffer, with the codes nearest to these rows, given the other buffers in `tensors`."""
        raise NotImplementedError(f"{self}: has_nearest is false")

    def of_part(self, in_features: int) -> QuantFormat:
        """This format for parts of rows of `in_features`."""
        return self

    def unit(self, in_features: int) -> int:
        """Number of neighbouring inputs that no rank may cut: those that share bytes or a scale."""
        if self.fits(in_features):
            return 1
        return math.lcm(*(buffer.inputs or 1 for buffer in self.buffers(in_features)))

    def nbytes(self, out_features: int, in_features: int) -> int:
        """Bytes of a weight in this format, all buffers together. ConfigError if `fits` declines."""
        buffers = self.buffers(in_features)
        return out_features * sum(buffer.width(in_features) * buffer.dtype.itemsize for buffer in buffers)

    def empty(self, shape: tuple[int, int], device: torch.device) -> QuantizedWeight:
        """A weight with uninitialised buffers."""
        (rows, columns), buffers = shape, self.buffers(shape[1])
        tensors = {
            buffer.name: torch.empty(rows, buffer.width(columns), dtype=buffer.dtype, device=device)
            for buffer in buffers
        }
        return QuantizedWeight(tensors, (rows, columns), self)

    @torch.no_grad()
    def quantize(self, weight: torch.Tensor) -> QuantizedWeight:
        """Quantize a floating weight [out, in] on any device; on meta, only the shapes are computed.

        Rows are independent, so a shard of rows quantizes to the shard of the codes. ConfigError for NaN, infinite or
        huge (above `largest_weight`) values, for another number of dimensions or dtype, and for a width that `fits`
        declines.
        """
        if weight.dim() != 2 or not weight.is_floating_point():
            raise ConfigError(
                f"{self} quantizes floating matrices [out, in]; this is {weight.dtype} {list(weight.shape)}"
            )
        made = self.empty((weight.shape[0], weight.shape[1]), weight.device)
        if weight.is_meta or not weight.numel():
            return made
        for part in _row_blocks(weight):
            w_RI = weight[part].float()
            self._refuse_unstorable(w_RI, part.start, weight)
            for tensor, coded in zip(made.tensors.values(), self.encode(w_RI), strict=True):
                tensor[part] = coded.reshape(len(w_RI), -1)
        return made

    @torch.no_grad()
    def dequantize(self, weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Decode to values [out, in]: exact in float32, rounded once for a narrower dtype."""
        assert weight.format == self, f"{weight.format} is not {self}"
        out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
        if not out.is_meta and out.numel():
            for part in _row_blocks(out):
                out[part] = self.decode({name: tensor[part] for name, tensor in weight.tensors.items()})
        return out

    @torch.no_grad()
    def codes(self, values: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Codes nearest to `values` [out, in], with all other buffers from `tensors`.

        The inverse of `dequantize`, even if that rounded to 16 bits. Only for formats with `has_nearest`.
        """
        rows, columns = values.shape
        buffer = self.buffers(columns)[0]
        others = {name: tensor for name, tensor in tensors.items() if name != buffer.name}
        out = torch.empty(rows, buffer.width(columns), dtype=buffer.dtype, device=values.device)
        for part in _row_blocks(values) if values.numel() else ():
            out[part] = self.nearest(values[part].float(), {name: tensor[part] for name, tensor in others.items()})
        return out

    def _refuse_unstorable(self, w_RI: torch.Tensor, first_row: int, weight: torch.Tensor) -> None:
        largest = self.largest_weight
        lowest, highest = torch.aminmax(w_RI)  # NaN propagates, and fails both comparisons
        if lowest.item() >= -largest and highest.item() <= largest:
            return
        row, column = torch.nonzero(~(w_RI.abs() <= largest))[0].tolist()
        raise ConfigError(
            f"a weight {list(weight.shape)} holds {w_RI[row, column].item()} at [{first_row + row}, {column}]; "
            f"NaN, infinite values and magnitudes above {largest:.2g} cannot be quantized"
        )


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """One quantized matrix [out, in]: the tensors of `format.buffers` by name, in that order.

    A plain container: it never computes. In a kernel's layout (ops/op.py), tensors keep their names.
    """

    tensors: Mapping[str, torch.Tensor]
    shape: tuple[int, int]
    format: QuantFormat = field(repr=False)

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], format: QuantFormat) -> QuantizedWeight:
        """From the tensors of `format.buffers` by name, in any order and among others."""
        return cls({buffer.name: tensors[buffer.name] for buffer in format.buffers(shape[1])}, shape, format)

    @classmethod
    def listed(cls, tensors: Iterable[torch.Tensor], shape: tuple[int, int], format: QuantFormat) -> QuantizedWeight:
        """From the tensors in the order of `format.buffers`."""
        names = [buffer.name for buffer in format.buffers(shape[1])]
        return cls(dict(zip(names, tensors, strict=True)), shape, format)

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def _row_blocks(matrix: torch.Tensor) -> Iterator[slice]:
    step = max(1, (CPU_BLOCK_VALUES if matrix.device.type == "cpu" else DEVICE_BLOCK_VALUES) // matrix.shape[1])
    return (slice(start, start + step) for start in range(0, matrix.shape[0], step))
