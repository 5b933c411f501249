"""Codes of 4 bits that PyTorch packed for its own product: on GPUs in tiles of 8 outputs, on CPUs in blocks of 64.

On CPUs the order within a block depends on the instruction set, so PyTorch is asked: it packs the positions of codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from infuse.weights.coded.form import ceil_div
from infuse.weights.lazy import LazyTensor, Shape, Slices, of_all_axes

_TILE = 8  # outputs of a tile
_STEP = 16  # inputs of a tile; a word has codes of two
_BLOCK = 64  # outputs that CPUs pack together, or two times 32
_MOST_SHAPES = 4  # whose order is kept: models have few widths


@dataclass(frozen=True, eq=False)
class TilePacked:
    """Codes [out, in], uint8, of int32 words [tiles of outputs, inputs / (16 * n), 32, n / 2], for n of 2, 4 or 8.

    Thread 4 o + i of a tile has the output o. In its word for 32 inputs, from the lowest bits: the even ones of inputs
    2 i, 2 i + 8, 2 i + 16 and 2 i + 24, then the odd ones behind each. Outputs and inputs may be padded.
    """

    source: LazyTensor
    shape: Shape

    dtype, coded = torch.uint8, None

    def read(self, part: Slices = ()) -> Tensor:
        rows, columns = of_all_axes(part, 2)
        start, stop, _ = rows.indices(self.shape[0])
        first = start // _TILE
        words = self.source.read((slice(first, ceil_div(stop, _TILE)),))
        tiles, outer, _, inner = words.shape
        codes = words.reshape(tiles, outer, _TILE, 4, inner, 1) >> torch.arange(0, 32, 4, device=words.device) & 15
        # tile, outer, output, i, inner, (odd, half, eights) → tile, output, outer, inner, half, eights, i, odd
        codes = codes.to(torch.uint8).unflatten(-1, (2, 2, 2)).permute(0, 2, 1, 4, 6, 7, 3, 5)
        matrix = codes.reshape(tiles * _TILE, outer * inner * 2 * _STEP)[
            start - first * _TILE : stop - first * _TILE, : self.shape[1]
        ]
        return matrix[:, columns]


@dataclass(frozen=True, eq=False)
class PackedForCPU:
    """Codes [out, in], uint8, of bytes as PyTorch packed them on a CPU like this one."""

    source: LazyTensor  # [out, in / 2]
    shape: Shape

    dtype, coded = torch.uint8, None

    def read(self, part: Slices = ()) -> Tensor:
        rows, columns = of_all_axes(part, 2)
        (out, inputs), (start, stop, _) = self.shape, rows.indices(self.shape[0])
        first, last = start // _BLOCK * _BLOCK, min(ceil_div(stop, _BLOCK) * _BLOCK, out)
        packed, pieces = self.source.read((slice(first, last),)), []
        whole = (last - first) // _BLOCK * _BLOCK
        for count, of in ((_BLOCK, packed[:whole]), (last - first - whole, packed[whole:])):
            if len(of):
                blocks = of.reshape(len(of) // count, -1)
                codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)
                pieces.append(codes.index_select(1, _places(count, inputs)).reshape(-1, inputs))
        codes = torch.cat(pieces) if pieces else torch.empty(0, inputs, dtype=torch.uint8)
        return codes[start - first : stop - first, columns]


def offsets(scale: Tensor, zero: Tensor) -> Tensor | None:
    """zero - 8 * scale in float32, for scale * (code - 8) + zero as scale * code + offset; None if values would differ.

    They would if the difference was rounded, or products with codes: those of 16 bits are exact.
    """
    less = scale.float() * -8
    offset = zero.float() + less
    added = offset - zero  # the rounding error of a sum is a float (Knuth's TwoSum)
    is_exact = bool(((zero - (offset - added)) + (less - added) == 0).all())
    return offset if is_exact and scale.dtype.itemsize == 2 else None


@lru_cache(_MOST_SHAPES)
def _places(rows: int, inputs: int) -> Tensor:
    """The place among the packed codes of each code of a block of `rows`."""
    count = rows * inputs
    positions, of_places = torch.arange(count, dtype=torch.int32), torch.zeros(count, dtype=torch.int32)
    for shift in range(0, count.bit_length(), 4):
        digits = (positions >> shift & 15).reshape(rows, inputs)
        packed = torch._convert_weight_to_int4pack_for_cpu(digits, 2).reshape(-1)  # the number is not used on CPUs
        of_places |= torch.stack((packed & 15, packed >> 4), dim=-1).flatten().to(torch.int32) << shift
    places = of_places.argsort().to(torch.int32)
    assert torch.equal(of_places[places], positions), "PyTorch packs codes of 4 bits otherwise"
    return places
