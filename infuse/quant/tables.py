"""nf4 and fp4 of bitsandbytes: codes of 4 bits that stand for the 16 values of a table, one scale for each group.

    weight[o, i] = scale[o, g] * TABLES[name][code[o, i]]        g = the group of input i

    data   uint8 [out, in / 2]; input 2j is the low nibble, input 2j + 1 the high one
    scale  float32 [out, groups], the largest magnitude of its group, as int32 bits; there is no zero point

nf4: Dettmers et al., QLoRA, 2023: quantiles of N(0,1). fp4 has three bits for sign and exponent, and is not e2m1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from infuse.ground.errors import ConfigError
from infuse.quant.grouped import SMALLEST_SCALE, GroupedFormat, scales_of
from infuse.quant.integer import pack_nibbles, unpack_nibbles

TABLES: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        "nf4": (
            -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
            -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
            0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
        ),
        "fp4": tuple(
            sign * magnitude / 12
            for sign in (1.0, -1.0)
            for magnitude in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
        ),
    }
)  # fmt: skip
DEFAULT_GROUP: Mapping[str, int] = MappingProxyType({"nf4": 64, "fp4": 64})
# Relative RMS error of a round trip in groups of 64, measured on 2**20 values of N(0,1). A test measures it again.
ERRORS = MappingProxyType({"nf4": 0.0920, "fp4": 0.1219})


@dataclass(frozen=True)
class TableFormat(GroupedFormat):
    """nf4 or fp4: the nearest value of a table, times the largest magnitude of the group."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.symmetric or self.activation_bits != 16 or self.scale_dtype is not torch.float32:
            raise ConfigError(f"{self.name} has no options but the size of its groups; possible: {self.name}:64")

    def __str__(self) -> str:
        return (
            f"{self.name}:groups={self.groups}"
            if self.groups is not None
            else f"{self.name}:{self.group_size or 'row'}"
        )

    @property
    def expected_error(self) -> float:
        """Measured in groups of 64. Longer groups have up to 1.14 times this error in nf4 (rows of 1024)."""
        return ERRORS[self.name] * (1.0 if self.group_size is not None and self.group_size <= 64 else 1.2)

    def _coded(self, w_GN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        scale_G1 = w_GN.abs().amax(dim=-1, keepdim=True).clamp_min_(SMALLEST_SCALE)
        return self._nearest(w_GN, scale_G1, None), scale_G1, None

    def _nearest(self, w_GN: torch.Tensor, scale_G1: torch.Tensor, zero_G1: torch.Tensor | None) -> torch.Tensor:
        ordered, codes = torch.tensor(TABLES[self.name], device=w_GN.device).sort(stable=True)
        between = (ordered[1:] + ordered[:-1]) / 2
        return pack_nibbles(codes[torch.bucketize(w_GN / scale_G1, between)].to(torch.uint8))

    def _values(self, data: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
        values = torch.tensor(TABLES[self.name], device=data.device)[unpack_nibbles(data).long()]
        return values.reshape(*scale.shape, -1).mul_(scales_of(scale).unsqueeze(-1)).flatten(1)
