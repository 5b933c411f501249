"""fp8 (e4m3) and fp6 (e3m2), one scale per group of inputs or per row: the numbers that kernels must match.

    weight[o, i] = scale[o, g] * value(code[o, i])        g = the group of input i

    code   from the highest bit down: sign, exponent E, mantissa M
           value = ±2**(E - bias) * (1 + M / 2**m); for E = 0, ±2**(1 - bias) * M / 2**m; zero is the code 0
           fp8: 4 + 3 bits, bias 7, up to 448; fp6: 3 + 2 bits, bias 3, up to 28
    data   uint8, since casting a model also casts its tensors of floating dtypes
           fp8: the codes, [out, in]
           fp6: four codes in three bytes, [out, in * 3 / 4]; input 4j + k takes bits 6k to 6k + 5 of the
           24-bit little-endian word j
    scale  bfloat16 [out, groups], or float32 with :f32, as int32 bits; there is no zero point

Legend: w_GN is a block of weights, G groups of N values; tensors of [G, 1] hold one number per group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from infuse.ground.errors import ConfigError
from infuse.quant.grouped import ERROR_LENGTHS, SMALLEST_SCALE, GroupedFormat, scales_of


@dataclass(frozen=True)
class Grid:
    """Values of the codes: `mantissa` bits, smallest normal value, start of the highest binade, largest value.

    The PyTorch dtype `carrier` encodes a value times `carried` with the same exponent and mantissa bits. For e3m2 it is
    e5m2, whose bias is larger by 12.
    """

    mantissa: int
    smallest_normal: float
    top_binade: float
    largest: float
    carrier: torch.dtype
    carried: float


GRIDS: Mapping[str, Grid] = MappingProxyType(
    {
        "fp8": Grid(3, 2.0**-6, 256.0, 448.0, torch.float8_e4m3fn, 1.0),
        "fp6": Grid(2, 2.0**-2, 16.0, 28.0, torch.float8_e5m2, 2.0**-12),
    }
)

# Measured on N(0,1) as log2(relative error) + bits per weight, scales included (lower is better):
#   fp8: rows of 4096 2.73, groups of 256 2.68, of 128 2.68, of 64 2.72
#   fp6: rows of 4096 1.72, groups of 256 1.67, of 128 1.67, of 64 1.71, of 32 1.82
# A floating grid has a wide range of its own, so groups gain little: fp8 gets the simplest layout, one scale per row.
# fp6 reaches only 112 times its smallest normal value: groups keep small weights beside large ones out of its
# subnormals, and 64 divides widths that 128 does not.
DEFAULT_GROUP: Mapping[str, int | None] = MappingProxyType({"fp8": None, "fp6": 64})

# Candidate scales put the group's largest value at top_binade * (1 + k / 32), up to half a step beyond the largest
# code, where clamping costs no more than rounding. This covers an octave; beyond it the grid repeats. Short groups gain
# from finer spacing; rows of some hundred values average over the binade. The positions include all codes of the top
# binade, so quantizing again is exact: whichever code the largest value gets, one candidate is the same scale.
# A test holds the error within 5 % of brute force.
FINE, COARSE, SHORTEST_COARSE = range(-2, 29), range(0, 29, 4), 512

# Relative RMS error of a round trip by group length (ERROR_LENGTHS), measured on 2**20 values of N(0,1).
# A test measures it again.
ERRORS: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        "fp8": (0.0158, 0.0187, 0.0208, 0.0225, 0.0236, 0.0254, 0.0259, 0.0262),
        "fp6": (0.0330, 0.0383, 0.0423, 0.0453, 0.0474, 0.0507, 0.0516, 0.0522),
    }
)


@dataclass(frozen=True)
class FloatFormat(GroupedFormat):
    """fp8 or fp6: a floating grid per group, with the scale of least squared error found by search.

    Values are rounded to nearest, ties to even, including subnormals, and saturate beyond the largest code. Every value
    comes back within 1/16 (fp8) or 1/8 (fp6) of itself, or within half the smallest step. Quantizing a dequantized
    float32 weight gives the same weight.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.symmetric:
            raise ConfigError(
                f"{self.name} has no asymmetric form; possible: {self.name}, or int8 and int4 with :asymmetric"
            )
        if self.activation_bits != 16:
            raise ConfigError(f"{self.name} has no :a8; possible: {self.name}, or int8 and int4 with :a8")

    def __str__(self) -> str:
        wide = ":f32" if self.scale_dtype is torch.float32 else ""
        if self.groups is not None:
            return f"{self.name}:groups={self.groups}{wide}"
        if self.group_size == DEFAULT_GROUP[self.name]:
            return f"{self.name}{wide}"
        return f"{self.name}:{self.group_size or 'row'}{wide}"

    @property
    def expected_error(self) -> float:
        """From ERRORS, at this group length or the next longer one; whole rows count as the longest."""
        length = min(self.group_size or ERROR_LENGTHS[-1], ERROR_LENGTHS[-1])
        return next(error for known, error in zip(ERROR_LENGTHS, ERRORS[self.name], strict=True) if known >= length)

    def _coded(self, w_GN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        scale_G1 = _best_scale(w_GN, self.name, self.scale_dtype)
        return self._nearest(w_GN, scale_G1, None), scale_G1, None

    def _nearest(self, w_GN: torch.Tensor, scale_G1: torch.Tensor, zero_G1: torch.Tensor | None) -> torch.Tensor:
        return _codes(_rounded(w_GN / scale_G1, GRIDS[self.name]), self.name)

    def _values(self, data: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
        return _values(data, self.name).reshape(*scale.shape, -1).mul_(scales_of(scale).unsqueeze(-1)).flatten(1)


def pack_fp6(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes in [0, 63], uint8 [..., 4n], into uint8 [..., 3n], starting at the lowest bits of the first byte."""
    a, b, c, d = (codes[..., k::4] for k in range(4))
    return torch.stack((a | (b & 3) << 6, b >> 2 | (c & 15) << 4, c >> 4 | d << 2), dim=-1).flatten(-2)


def unpack_fp6(data: torch.Tensor) -> torch.Tensor:
    """Inverse of pack_fp6: uint8 [..., 3n] to codes [..., 4n]."""
    a, b, c = (data[..., k::3] for k in range(3))
    return torch.stack((a & 63, a >> 6 | (b & 15) << 2, b >> 4 | (c & 3) << 4, c >> 2), dim=-1).flatten(-2)


def _codes(values: torch.Tensor, name: str) -> torch.Tensor:
    """Encode values on the grid as bytes."""
    grid = GRIDS[name]
    carried = (values * grid.carried).to(grid.carrier).view(torch.uint8)
    return carried if name == "fp8" else pack_fp6((carried >> 2) & 32 | carried & 31)


def _values(data: torch.Tensor, name: str) -> torch.Tensor:
    """Inverse of _codes, in float32."""
    grid = GRIDS[name]
    if name == "fp6":
        codes = unpack_fp6(data)
        data = (codes & 32) << 2 | codes & 31
    return data.contiguous().view(grid.carrier).to(torch.float32).mul_(1 / grid.carried)


def _rounded(steps: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Round to the nearest value of the grid, ties to the even code; never -0."""
    steps = steps.clamp(-grid.largest, grid.largest)
    binade = (steps.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_min_(grid.smallest_normal)
    # Near `rounder`, float32 values are spaced like the grid, so the sum is rounded to the grid.
    rounder = binade.mul_(1.5 * 2 ** (23 - grid.mantissa))
    return steps.add_(rounder).sub_(rounder)


def _best_scale(w_GN: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
    """The scale of least squared error for each group, as it will be stored, [G, 1]; the first of equals."""
    grid, largest_G1 = GRIDS[name], w_GN.abs().amax(dim=-1, keepdim=True)
    best_G1 = best_error_G1 = None
    for position in positions(grid, w_GN.shape[1]):
        # SMALLEST_SCALE is normal, so its reciprocal stays finite in flush-to-zero modes.
        scale_G1 = (largest_G1 / position).to(dtype).float().clamp_min_(SMALLEST_SCALE)
        steps_GN = w_GN * scale_G1.reciprocal()
        # Norms instead of squares, and steps times scale instead of weights: neither overflows nor underflows for huge
        # or tiny weights.
        error_G1 = torch.linalg.vector_norm(steps_GN.sub_(_rounded(steps_GN, grid)), dim=-1, keepdim=True) * scale_G1
        if best_G1 is None or best_error_G1 is None:
            best_G1, best_error_G1 = scale_G1, error_G1
            continue
        best_G1 = torch.where(error_G1 < best_error_G1, scale_G1, best_G1)
        best_error_G1 = torch.minimum(error_G1, best_error_G1)
    assert best_G1 is not None
    return best_G1


def positions(grid: Grid, length: int) -> Iterator[float]:
    """Yield candidate grid positions for the largest value of a group of `length`."""
    farthest = grid.largest + grid.top_binade / 2 ** (grid.mantissa + 1)
    for part in FINE if length < SHORTEST_COARSE else COARSE:
        if (position := grid.top_binade * (1 + part / 32)) <= farthest:
            yield position
