"""int4, int3 and int2 with a scale and an offset for each group: grids of files whose zeros are no steps of the scale.

    weight[o, i] = scale[o, g] * code[o, i] + offset[o, g]        g = the group of input i

    data    uint8, as in the format without an offset (integer.py), but codes count from 0: to 15, 7 or 3
    scale   [out, groups], as there
    offset  int32 [out, groups]: the bits of float32

quanto's weights of 4 and 2 bits are scale * code - shift. torchao's are scale * (code - 8) + zero, which is exact here
too: the offset zero - 8 * scale of 16-bit numbers fits float32, unless one is far below the other.

Legend: w_RI are rows of a weight, R rows of I inputs, in G groups of N.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from infuse.ground.errors import ConfigError
from infuse.quant.format import Buffer
from infuse.quant.grouped import scales_of
from infuse.quant.integer import IntegerFormat, pack_unsigned, range_of, unpack_unsigned

_BITS = torch.int32  # casting a model leaves the bits of float32 alone in it


@dataclass(frozen=True)
class OffsetFormat(IntegerFormat):
    """int4, int3 or int2 with `:offset`. Quantizing finds the same grids as with `:asymmetric`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits == 8 or self.activation_bits != 16:
            raise ConfigError(f"{self.name} has no such :offset; possible: int4, int3, int2 with :offset, without :a8")

    @property
    def kind(self) -> str:
        return ":offset"

    def buffers(self, in_features: int) -> tuple[Buffer, ...]:
        data, scale, zero = super().buffers(in_features)
        return data, scale, Buffer("offset", _BITS, zero.inputs)

    def encode(self, w_RI: torch.Tensor) -> Iterable[torch.Tensor]:
        data, scale, zero_G1 = super().encode(w_RI)
        least_G1 = range_of(self.bits)[0] - zero_G1.float() * self.zero_unit  # the value of the code 0, in steps
        return data, scale, (least_G1 * scales_of(scale).float()).view(_BITS)

    def decode(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        scale, offset = scales_of(tensors["scale"]), tensors["offset"].view(torch.float32)
        codes_RGN = unpack_unsigned(tensors["data"], self.bits).reshape(*scale.shape, -1).to(torch.float32)
        return codes_RGN.mul_(scale.unsqueeze(-1)).add_(offset.unsqueeze(-1)).flatten(1)

    def nearest(self, w_RI: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        scale, offset = scales_of(tensors["scale"]).float(), tensors["offset"].view(torch.float32)
        w_RGN = w_RI.reshape(*scale.shape, -1)
        codes_RGN = ((w_RGN - offset.unsqueeze(-1)) / scale.unsqueeze(-1)).round_().clamp_(0, 2**self.bits - 1)
        return pack_unsigned(codes_RGN.to(torch.uint8).flatten(1), self.bits)
