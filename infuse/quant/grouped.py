"""GroupedFormat: codes, one scale for each group of inputs and, where the format has them, zero points.

int8 to int2, fp8, fp6 and mxfp4 share it; the arithmetic of each family is in its own file.

Legend: a group is a run of neighbouring inputs of one row that share a scale; w_GN are G groups of N values; tensors of
[G, 1] hold one number for each group.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from infuse.ground.errors import ConfigError
from infuse.quant.format import Buffer, QuantFormat

# Scales are bfloat16 by default: a step that is off by 0.2 % costs nothing if codes are rounded against the stored
# step. In float16, groups whose largest value is below 4e-4 (int4) or 8e-3 (int8) fall into the subnormals; float32
# would cost two more bytes per group. With bfloat16's 8 significant bits, scale * code is also exact in float32.
SCALE_DTYPE = torch.bfloat16
# Scale of all-zero groups. It is normal, so 1 / scale stays finite in flush-to-zero modes.
SMALLEST_SCALE = 2.0**-126

ERROR_LENGTHS = (16, 32, 64, 128, 256, 1024, 4096, 16384)  # group lengths at which each family measured its errors

# Why inputs come in multiples of GroupedFormat.pack, by bits, and which multiples.
_SHARED = {
    2: "four values share a byte",
    3: "eight values share three bytes",
    4: "two values share a byte",
    6: "four values share three bytes",
}
_MULTIPLE = {2: "even", 4: "a multiple of 4", 8: "a multiple of 8"}


@dataclass(frozen=True)
class GroupedFormat(QuantFormat):
    """Buffers: `data`, the codes; `scale` and, if not `symmetric`, `zero` for each group.

    `group_size` inputs share a scale; None means the whole row or, if `groups` is set, one `groups`-th of it.
    """

    group_size: int | None
    symmetric: bool = True
    groups: int | None = None
    scale_dtype: torch.dtype = field(default=SCALE_DTYPE, kw_only=True)

    def __post_init__(self) -> None:
        assert self.group_size is None or self.groups is None
        for what, number in (("group size", self.group_size), ("number of groups", self.groups)):
            if number is not None and number < 1:
                raise ConfigError(f"{self.name}: the {what} is {number}; it must be at least 1")
        if self.group_size is not None and self.group_size % self.pack:
            raise ConfigError(
                f"{self.name}: {_SHARED[self.bits]}, so the group size must be {_MULTIPLE[self.pack]}, "
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

    def buffers(self, in_features: int) -> tuple[Buffer, ...]:
        groups = self.group_count(in_features)
        of_row = self.group_size is None and self.groups is None
        group = None if of_row else in_features // max(groups, 1) or self.pack
        codes = torch.int8 if self.name == "int8" else torch.uint8
        buffers = (
            Buffer("data", codes, self.pack, self.pack * self.bits // 8),
            Buffer("scale", self.dtype_of_scales, group),
        )
        return buffers if self.symmetric else (*buffers, Buffer("zero", torch.int8, group))

    @property
    def dtype_of_scales(self) -> torch.dtype:
        """The dtype of the buffer: float32 is stored as the bits of int32, which casting a model leaves alone."""
        return torch.int32 if self.scale_dtype is torch.float32 else self.scale_dtype

    def encode(self, w_RI: torch.Tensor) -> Iterable[torch.Tensor]:
        groups = self.group_count(w_RI.shape[1])
        data, scale, zero = self._coded(w_RI.reshape(-1, w_RI.shape[1] // groups))
        if self.scale_dtype is torch.float32:
            scale = scale.view(torch.int32)
        return (data, scale) if zero is None else (data, scale, zero)

    def decode(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._values(tensors["data"], tensors["scale"], tensors.get("zero"))

    @property
    def has_nearest(self) -> bool:
        return True

    def nearest(self, w_RI: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        scale, zero = tensors["scale"], tensors.get("zero")
        zero_G1 = None if zero is None else zero.float().reshape(-1, 1)
        w_GN = w_RI.reshape(-1, w_RI.shape[1] // scale.shape[1])
        return self._nearest(w_GN, scales_of(scale).float().reshape(-1, 1), zero_G1).reshape(len(w_RI), -1)

    @property
    def pack(self) -> int:
        """Number of neighbouring inputs that share whole bytes: 1 for 8 bits, 2 for 4, 4 for 6 and 2, 8 for 3."""
        return 8 // math.gcd(8, self.bits)

    def fits(self, in_features: int) -> str | None:
        if in_features % self.pack:
            return f"{self}: {_SHARED[self.bits]}, and {in_features} inputs are not {_MULTIPLE[self.pack]}"
        if self.group_size is not None and in_features % self.group_size:
            divisors = [str(size) for size in (128, 64, 32) if in_features % size == 0 and size != self.group_size]
            would = " or ".join(divisors) if divisors else "row"
            return f"{self}: groups of {self.group_size} do not divide {in_features} inputs ({would} would)"
        if self.groups is not None and in_features % self.groups:
            return f"{self}: {in_features} inputs do not divide into {self.groups} groups"
        if self.groups is not None and (length := in_features // self.groups) % self.pack:
            each = f"{in_features} inputs in {self.groups} groups are {length} for each, not {_MULTIPLE[self.pack]}"
            return f"{self}: {_SHARED[self.bits]}, and {each}"
        return None

    def of_part(self, in_features: int) -> GroupedFormat:
        """This format for parts of rows of `in_features`.

        Parts keep the group size of the whole row, so `groups=N` becomes a fixed group size.
        """
        if self.groups is None or in_features % self.groups:
            return self
        return replace(self, group_size=in_features // self.groups, groups=None)

    def unit(self, in_features: int) -> int:
        return self.of_part(in_features).group_size or self.pack

    def group_count(self, in_features: int) -> int:
        """Number of groups, and thus scales, in a row of `in_features`. ConfigError if `fits` declines."""
        if reason := self.fits(in_features):
            raise ConfigError(reason)
        if in_features == 0:
            return 0
        if self.groups is not None:
            return self.groups
        return 1 if self.group_size is None else in_features // self.group_size


def scales_of(scale: torch.Tensor) -> torch.Tensor:
    """The numbers in a buffer of scales."""
    return scale.view(torch.float32) if scale.dtype is torch.int32 else scale
