"""int8, int4, int3 and int2, one scale per group of inputs, symmetric or with a zero point: what kernels must match.

    weight[o, i] = scale[o, g] * (code[o, i] - zero[o, g] * unit)
    g = the group of input i; unit = 2**bits / 256; symmetric formats have no zero

    data   int8: the codes, int8 [out, in]
           int4: code + 8, two per byte, uint8 [out, in / 2]; input 2j is the low nibble, input 2j + 1 the high one
           int3: code + 4, uint8 [out, in / 8 * 3], lowest bits first: input 8j + k takes bits 3k to 3k + 2 of 3 bytes
           int2: code + 2, uint8 [out, in / 4]; input 4j + k takes bits 2k and 2k + 1
    scale  bfloat16 [out, groups]; float16 with :f16, in which GPTQ, AWQ and GGUF have theirs; float32 with :f32, as
           int32 bits, which casting a model leaves alone
    zero   int8 [out, groups], in units of a step: 1 (int8), 1/16 (int4), 1/32 (int3) or 1/64 (int2); or None

Legend: w_GN is a block of weights, G groups of N values; tensors of [G, 1] hold one number per group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from infuse.ground.errors import ConfigError
from infuse.quant.grouped import ERROR_LENGTHS, SCALE_DTYPE, SMALLEST_SCALE, GroupedFormat, scales_of
from infuse.quant.packing import pack_bits, unpack_bits


def range_of(bits: int) -> tuple[int, int]:
    """The lowest and the highest code."""
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


# Measured on N(0,1) as log2(relative error) + bits per weight, scales included (lower is better):
#   int8: rows of 4096 1.15, groups of 128 0.80, of 64 0.76, of 32 0.81
#   int4: rows of 4096 0.79, groups of 128 0.76, of 64 0.78, of 32 0.89
# Groups beat rows even without outliers, and by more with them. 64 and 128 are about equal, and 64 divides widths that
# 128 does not (320, 576, 960, 1600, 2880, 4544).
DEFAULT_GROUP = {"int8": 64, "int4": 64, "int3": 64, "int2": 64}

# Candidates for each group's step. The one of least squared error is stored; tests hold it within 5 % of brute force.

# Factors by which the largest value may exceed the grid and be clipped to an outermost code: 7 or -8 of int4.
CLIPS = tuple(1.05**i for i in range(16))
# By bits, symmetric: the step is the largest value divided by one of these.
DIVISORS = MappingProxyType(
    {bits: tuple(code * clip for clip in CLIPS for code in reversed(range_of(bits))) for bits in (2, 3, 4)}
)
# Asymmetric: fractions of half the span that are cut off at the (high, low) ends. The ends differ by at most two places
# of the list (34 candidates). Three places (44 candidates) reduce the error of groups of 32 to 4096 normal or Laplace
# values by at most 0.15 %.
CUTS = (0.0, 0.04, 0.08, 0.12, 0.17, 0.24, 0.32, 0.42)
ENDS = tuple((high, low) for i, high in enumerate(CUTS) for low in CUTS[max(0, i - 2) : i + 3])
INT8_LARGEST = tuple(range(127, 111, -1))  # symmetric: the code of the largest value; nothing is clipped
# Asymmetric: steps between the smallest and the largest value; 253 is always possible.
INT8_SPANS = (253, 255, 254, *range(252, 239, -1))


# Relative RMS error of a round trip by (bits, symmetric) and group length (ERROR_LENGTHS), measured on 2**20 values of
# N(0,1). A test measures it again.
ERRORS = {
    (8, True): (0.00396, 0.00484, 0.00558, 0.00625, 0.00682, 0.00784, 0.00862, 0.00944),
    (8, False): (0.00341, 0.00425, 0.00501, 0.00568, 0.00629, 0.00732, 0.00817, 0.00906),
    (4, True): (0.0714, 0.0818, 0.0901, 0.0969, 0.101, 0.106, 0.108, 0.109),
    (4, False): (0.0595, 0.0716, 0.0822, 0.0909, 0.0978, 0.105, 0.107, 0.108),
    (3, True): (0.144, 0.163, 0.177, 0.186, 0.192, 0.197, 0.200, 0.201),
    (3, False): (0.123, 0.148, 0.166, 0.179, 0.187, 0.193, 0.197, 0.202),
    (2, True): (0.303, 0.333, 0.354, 0.367, 0.376, 0.384, 0.386, 0.387),
    (2, False): (0.264, 0.302, 0.324, 0.341, 0.353, 0.379, 0.412, 0.446),
}


# The smallest scale of each dtype: that of all-zero groups. In float16 steps below 6e-5 are multiples of it, so groups
# whose largest value is below 4e-4 (int4) or 8e-3 (int8) have coarser steps.
_SMALLEST = MappingProxyType({SCALE_DTYPE: SMALLEST_SCALE, torch.float16: 2.0**-24, torch.float32: SMALLEST_SCALE})
_OPTION = MappingProxyType({SCALE_DTYPE: "", torch.float16: ":f16", torch.float32: ":f32"})
LARGEST_WITH_FLOAT16 = 2.0**15  # no step of such weights exceeds float16


@dataclass(frozen=True)
class IntegerFormat(GroupedFormat):
    """int8 to int2: a uniform grid per group, with the step of least squared error found by search.

    int8 clips nothing: every value comes back within half a step; symmetric codes stay within [-127, 127]. The others
    use all levels and may clip the largest values; a symmetric step may be negative, so that the lowest code encodes
    the largest value. Asymmetric grids always include zero. Quantizing a dequantized float32 weight gives the same
    weight, but for groups with the smallest scales of float16.

    int3 and int2 hold published codes. Their grids are those of int4, with fewer levels.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits < 4 and self.activation_bits != 16:
            raise ConfigError(f"{self.name} has no :a8; possible: {self.name}, or int8 and int4 with :a8")

    def __str__(self) -> str:
        size = f":groups={self.groups}" if self.groups is not None else f":{self.group_size or 'row'}"
        if self.bits == 8 and self.group_size == DEFAULT_GROUP["int8"]:
            size = ""  # plain "int8" is unambiguous; int4 always names its group, as its quality depends on it
        options = (self.kind, _OPTION[self.scale_dtype], ":a8" if self.activation_bits == 8 else "")
        return f"{self.name}{size}{''.join(options)}"

    @property
    def kind(self) -> str:
        """The option that tells how zero is stored, as in the format's text."""
        return "" if self.symmetric else ":asymmetric"

    @property
    def largest_weight(self) -> float:
        return LARGEST_WITH_FLOAT16 if self.scale_dtype is torch.float16 else super().largest_weight

    @property
    def zero_unit(self) -> float:
        """Value of 1 in `zero`, in steps of the scale."""
        return 2**self.bits / 256

    @property
    def expected_error(self) -> float:
        """Interpolated from ERRORS over the logarithm of the group length; whole rows count as the longest."""
        errors = ERRORS[self.bits, self.symmetric]
        length = min(max(self.group_size or ERROR_LENGTHS[-1], ERROR_LENGTHS[0]), ERROR_LENGTHS[-1])
        right = next(i for i, known in enumerate(ERROR_LENGTHS) if known >= length)
        left = max(right - 1, 0)
        if left == right:
            return errors[0]
        part = math.log(length / ERROR_LENGTHS[left]) / math.log(ERROR_LENGTHS[right] / ERROR_LENGTHS[left])
        return errors[left] + part * (errors[right] - errors[left])

    @property
    def proof_tolerance(self) -> float:
        """QuantFormat.proof_tolerance, doubled at 8 bits and combined with the error of 8-bit activations.

        A step follows the largest value of its group: at 8 bits, the error in a trained embedding table is 3.4 times
        that on normal weights, which is 2 % of the weights' size.
        """
        of_weights = super().proof_tolerance * (2 if self.bits == 8 else 1)
        if self.activation_bits == 16:
            return of_weights
        of_activations = replace(self, name="int8", bits=8, symmetric=True, activation_bits=16).proof_tolerance
        return math.hypot(of_weights, of_activations)

    def _coded(self, w_GN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        scale_G1, zero_G1 = _best(w_GN, self._candidates(w_GN))
        stored_G1 = None if zero_G1 is None else zero_G1 / self.zero_unit
        return self._nearest(w_GN, scale_G1, stored_G1), scale_G1, stored_G1

    def _nearest(self, w_GN: torch.Tensor, scale_G1: torch.Tensor, zero_G1: torch.Tensor | None) -> torch.Tensor:
        steps = w_GN / scale_G1
        if zero_G1 is not None:
            steps += zero_G1 * self.zero_unit
        codes = steps.round_().clamp_(*range_of(self.bits)).to(torch.int8)
        return codes if self.bits == 8 else pack_integers(codes, self.bits)

    def _values(self, data: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
        codes = data if self.bits == 8 else unpack_integers(data, self.bits)
        values = codes.reshape(*scale.shape, -1).to(torch.float32)
        if zero is not None:
            values -= zero.unsqueeze(-1) * self.zero_unit
        return values.mul_(scales_of(scale).unsqueeze(-1)).flatten(1)

    def _candidates(self, w_GN: torch.Tensor) -> Iterator[Grid]:
        if self.bits == 8:
            return (_symmetric_int8 if self.symmetric else _asymmetric_int8)(w_GN, self.scale_dtype)
        return (_symmetric if self.symmetric else _asymmetric)(w_GN, self.scale_dtype, self.bits)


@dataclass(frozen=True)
class Grid:
    """Step and zero point of each group, [G, 1], float32: the step rounded as stored, the zero in steps."""

    bits: int
    scale_G1: torch.Tensor
    zero_G1: torch.Tensor | None


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes in [0, 15], uint8 [..., 2n], into uint8 [..., n], even inputs in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(data: torch.Tensor) -> torch.Tensor:
    """Inverse of pack_nibbles: uint8 [..., n] to codes [..., 2n]."""
    return torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)


def pack_integers(codes: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Pack codes of 2, 3 or 4 bits, int8 [R, in], into uint8 [R, in * bits / 8] as unsigned ones, lowest bits first."""
    return pack_unsigned((codes + (1 << bits - 1)).to(torch.uint8), bits)


def unpack_integers(data: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Inverse of pack_integers."""
    return unpack_unsigned(data, bits).to(torch.int8) - (1 << bits - 1)


def pack_unsigned(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """pack_integers for codes that count from 0, uint8 [R, in]."""
    return pack_nibbles(codes) if bits == 4 else pack_bits(codes, bits)


def unpack_unsigned(data: torch.Tensor, bits: int) -> torch.Tensor:
    """Inverse of pack_unsigned."""
    return unpack_nibbles(data) if bits == 4 else unpack_bits(data, bits)


def _best(w_GN: torch.Tensor, grids: Iterator[Grid]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The grid of least squared error for each group; the first of equals."""
    steps_GN, codes_GN = torch.empty_like(w_GN), torch.empty_like(w_GN)
    best: Grid | None = None
    for grid in grids:
        torch.mul(w_GN, grid.scale_G1.reciprocal(), out=steps_GN)
        if grid.zero_G1 is not None:
            steps_GN += grid.zero_G1
        torch.round(steps_GN, out=codes_GN).clamp_(*range_of(grid.bits))
        # Norms instead of squares, and steps times scale instead of weights: neither overflows nor underflows for huge
        # or tiny weights.
        error_G1 = torch.linalg.vector_norm(steps_GN.sub_(codes_GN), dim=-1, keepdim=True) * grid.scale_G1.abs()
        if best is None:
            best, best_error_G1 = grid, error_G1
            continue
        better = error_G1 < best_error_G1
        best_error_G1 = torch.where(better, error_G1, best_error_G1)
        zero_G1 = (
            None if best.zero_G1 is None or grid.zero_G1 is None else torch.where(better, grid.zero_G1, best.zero_G1)
        )
        best = Grid(grid.bits, torch.where(better, grid.scale_G1, best.scale_G1), zero_G1)
    assert best is not None
    return best.scale_G1, best.zero_G1


def _stored(scale_G1: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round the scale to `dtype`: to bfloat16, off by at most 1/256 of itself; at least the dtype's smallest scale."""
    magnitude = scale_G1.abs().to(dtype).float().clamp_min(_SMALLEST[dtype])
    return torch.where(scale_G1 < 0, -magnitude, magnitude)


def _stored_below(scale_G1: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The largest value of `dtype` not above the (positive) scale, at least the dtype's smallest scale."""
    if dtype is torch.float32:
        below_G1 = scale_G1
    elif dtype is SCALE_DTYPE:
        below_G1 = (scale_G1.view(torch.int32) & -65536).view(torch.float32)
    else:
        near_G1 = scale_G1.to(dtype)
        previous_G1 = (near_G1.view(torch.int16) - 1).view(dtype)
        below_G1 = torch.where(near_G1.float() > scale_G1, previous_G1, near_G1).float()
    return below_G1.clamp_min(_SMALLEST[dtype])


# In all four functions, quantizing again is exact: a candidate gives the extremes codes from which the same candidate
# list finds the same step again. Symmetric int8: k times 1/256 is less than half a step for k <= 127, so the largest
# value gets the code k itself. Fewer bits: the extremes always get the outermost codes. Asymmetric int8: spans outside
# the list are dropped.


def _symmetric_int8(w_GN: torch.Tensor, dtype: torch.dtype) -> Iterator[Grid]:
    largest_G1 = w_GN.abs().amax(dim=-1, keepdim=True)
    for code in INT8_LARGEST:
        yield Grid(8, _stored(largest_G1 / code, dtype), None)


def _symmetric(w_GN: torch.Tensor, dtype: torch.dtype, bits: int) -> Iterator[Grid]:
    extreme_G1 = w_GN.gather(-1, w_GN.abs().argmax(dim=-1, keepdim=True))
    for divisor in DIVISORS[bits]:
        yield Grid(bits, _stored(extreme_G1 / divisor, dtype), None)


def _span(w_GN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest value, extended to zero: the grids include zero, so the zero point fits its byte."""
    low_G1, high_G1 = torch.aminmax(w_GN, dim=-1, keepdim=True)
    return low_G1.clamp_max(0), high_G1.clamp_min(0)


def _asymmetric_int8(w_GN: torch.Tensor, dtype: torch.dtype) -> Iterator[Grid]:
    low_G1, high_G1 = _span(w_GN)
    first: Grid | None = None
    for span in INT8_SPANS:
        scale_G1 = _stored_below(high_G1 / span - low_G1 / span, dtype)
        zero_G1 = (127 - high_G1 / scale_G1).round_().clamp_(-128, 127)
        if first is None:
            first = Grid(8, scale_G1, zero_G1)
            yield first
            continue
        top_G1, bottom_G1 = (high_G1 / scale_G1 + zero_G1).round_(), (low_G1 / scale_G1 + zero_G1).round_()
        possible = (top_G1 <= 127) & (bottom_G1 >= -128) & (top_G1 - bottom_G1 >= min(INT8_SPANS))
        assert first.zero_G1 is not None
        yield Grid(8, torch.where(possible, scale_G1, first.scale_G1), torch.where(possible, zero_G1, first.zero_G1))


def _asymmetric(w_GN: torch.Tensor, dtype: torch.dtype, bits: int) -> Iterator[Grid]:
    low_G1, high_G1 = _span(w_GN)
    half_G1 = high_G1 / 2 - low_G1 / 2
    lowest, highest = range_of(bits)
    units = 256 >> bits  # of a zero, in a step
    for cut_high, cut_low in ENDS:
        top_G1 = high_G1 - cut_high * half_G1
        scale_G1 = _stored_below((2 - cut_high - cut_low) / (highest - lowest) * half_G1, dtype)
        zero_G1 = (units * (highest - top_G1 / scale_G1)).round_().clamp_(-128, units * highest) / units
        yield Grid(bits, scale_G1, zero_G1)
