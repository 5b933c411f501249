"""mxfp4 (e2m1 in blocks of 32 with a power-of-two scale): the numbers that kernels must match.

    weight[o, i] = scale[o, i // 32] * value(code[o, i])

    code   from the highest bit down: sign, two bits of exponent, one of mantissa: ±0, 0.5, 1, 1.5, 2, 3, 4, 6
    data   uint8 [out, in / 2]; input 2j is the low nibble, input 2j + 1 the high one
    scale  bfloat16 [out, in / 32], powers of two; there is no zero point

OCP Microscaling Formats 1.0 stores a block's exponent in a byte; bfloat16 holds all its powers of two, 2**-127 to
2**127, so weights published in this format (gpt-oss) keep their codes and their values.

Legend: w_GN is a block of weights, G groups of N values; tensors of [G, 1] hold one number per group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from infuse.ground.errors import ConfigError
from infuse.quant.format import QuantizedWeight
from infuse.quant.grouped import SCALE_DTYPE, SMALLEST_SCALE, GroupedFormat
from infuse.quant.integer import pack_nibbles, unpack_nibbles

BLOCK = 32
DEFAULT_GROUP: Mapping[str, int] = MappingProxyType({"mxfp4": BLOCK})
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*MAGNITUDES, *(-value for value in MAGNITUDES))  # by code
# The largest weights that are rounded down to each magnitude but the last: ties go to the even code.
_UPPER = (0.25, 0.75 - 2**-24, 1.25, 1.75 - 2**-23, 2.5, 3.5 - 2**-22, 5.0)
# Relative RMS error of a round trip, measured on 2**20 values of N(0,1). A test measures it again.
ERROR = 0.1117


@dataclass(frozen=True)
class MicroscalingFormat(GroupedFormat):
    """mxfp4: a floating grid per block of 32, with the power of two of least squared error as its scale.

    Values are rounded to nearest, ties to the even code, and saturate at 6 times the scale. Quantizing a dequantized
    float32 weight gives the same weight.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_size != BLOCK or not self.symmetric or self.activation_bits != 16:
            raise ConfigError(f"{self.name} has blocks of {BLOCK} and no options; possible: {self.name}")

    def __str__(self) -> str:
        return self.name

    @property
    def expected_error(self) -> float:
        """Relative RMS error of a round trip on normal weights, measured."""
        return ERROR

    def _coded(self, w_GN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        scale_G1 = _best_scale(w_GN)
        return self._nearest(w_GN, scale_G1, None), scale_G1.to(SCALE_DTYPE), None

    def _nearest(self, w_GN: torch.Tensor, scale_G1: torch.Tensor, zero_G1: torch.Tensor | None) -> torch.Tensor:
        steps_GN = w_GN / scale_G1
        codes_GN = _codes(steps_GN)
        signed_GN = codes_GN | ((steps_GN < 0) & (codes_GN > 0)).to(torch.uint8) << 3
        return pack_nibbles(signed_GN)

    def _values(self, data: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
        values = torch.tensor(E2M1, device=data.device)[unpack_nibbles(data).long()]
        return values.reshape(*scale.shape, -1).mul_(scale.float().unsqueeze(-1)).flatten(1)


def from_blocks(blocks: torch.Tensor, exponents: torch.Tensor) -> QuantizedWeight:
    """Take weights as they are published: uint8 codes [out, in / 32, 16] and scales 2**(exponent - 127) [out, in / 32].

    Values do not change. ConfigError if an exponent is 255, which is NaN.
    """
    rows, groups = exponents.shape
    tensors = {"data": blocks.reshape(rows, -1), "scale": scales_of_exponents(exponents)}
    return QuantizedWeight(tensors, (rows, groups * BLOCK), MicroscalingFormat("mxfp4", 4, BLOCK))


def scales_of_exponents(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2**(exponent - 127), bfloat16, of exponents in uint8. ConfigError if one is 255, which is NaN."""
    if bool((exponents == 255).any()):
        raise ConfigError("an exponent is 255 (NaN); possible: 0 to 254")
    bits = exponents.to(torch.int16) << 7
    return torch.where(bits == 0, 0x40, bits).to(torch.int16).view(SCALE_DTYPE)  # 2**-127 is subnormal


def _codes(steps: torch.Tensor) -> torch.Tensor:
    """The codes nearest to the magnitudes, without signs."""
    return torch.bucketize(steps.abs(), torch.tensor(_UPPER, device=steps.device)).to(torch.uint8)


def _best_scale(w_GN: torch.Tensor) -> torch.Tensor:
    """The power of two of least squared error for each group, float32 [G, 1]; the first of equals.

    The group's largest value becomes 4 to 8 steps, 2 to 4, or 8 to 16, and saturates at 6.
    """
    magnitudes = torch.tensor(MAGNITUDES, device=w_GN.device)
    _, exponent_G1 = torch.frexp(w_GN.abs().amax(dim=-1, keepdim=True))
    best_G1 = best_error_G1 = None
    for lower in (3, 2, 4):
        scale_G1 = torch.ldexp(torch.ones_like(exponent_G1, dtype=torch.float32), exponent_G1 - lower).clamp_min_(
            SMALLEST_SCALE
        )
        steps_GN = (w_GN / scale_G1).abs_()
        error_GN = steps_GN - magnitudes[_codes(steps_GN).long()]
        error_G1 = torch.linalg.vector_norm(error_GN, dim=-1, keepdim=True) * scale_G1
        if best_G1 is None or best_error_G1 is None:
            best_G1, best_error_G1 = scale_G1, error_G1
            continue
        best_G1 = torch.where(error_G1 < best_error_G1, scale_G1, best_G1)
        best_error_G1 = torch.minimum(error_G1, best_error_G1)
    assert best_G1 is not None
    return best_G1
