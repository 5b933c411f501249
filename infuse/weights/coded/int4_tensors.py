"""torchao's three classes of packed int4: plain, plain in words, and in the tiles of PyTorch's product on GPUs.

Int4Tensor                 qdata int8 [out, in / 2], signed codes, the even input in the low nibble; scale and
                           zero_point [groups, out];  weight = scale * code + zero_point
Int4PlainInt32Tensor       qdata int32 [out, in / 8], unsigned codes in order; scale [groups, out]; zero_point int8
                           likewise;  weight = scale * (code - zero_point)
Int4TilePackedTo4dTensor   qdata int32 [out / 8, in / 128, 32, 4]; scale_and_zero [groups, out, 2], both padded;
                           weight = scale * (code - 8) + zero
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from infuse.quant.integer import pack_nibbles
from infuse.weights.coded.buffers import BITS, Kept, Rows, Window, mapped, scale_buffer
from infuse.weights.coded.form import FLOATS, Found, Members, ceil_div
from infuse.weights.coded.scaled import group_text
from infuse.weights.coded.tinygemm import TilePacked, offsets
from infuse.weights.coded.values import Values, of_integers, regular_groups
from infuse.weights.lazy import FileTensor, LazyTensor, Shape, Slices

PLAIN, WORDS, TILES = "Int4Tensor", "Int4PlainInt32Tensor", "Int4TilePackedTo4dTensor"
PARTS: Mapping[str, tuple[str, ...]] = {
    PLAIN: ("qdata", "scale", "zero_point"),
    WORDS: ("qdata", "scale", "zero_point"),
    TILES: ("qdata", "scale_and_zero"),
}
_SIGNS = 0x88  # the highest bits of both codes of a byte
_PADDED = 128  # inputs of a tile's words


@dataclass(frozen=True)
class Windows:
    """What was read last of scales, and of zeros."""

    scales: Window
    zeros: Window

    @classmethod
    def new(cls) -> Windows:
        return cls(Window(), Window())


@dataclass(frozen=True)
class _Offsets:
    """The bits of the offsets [out, groups] of scales and zeros."""

    scale: LazyTensor
    zero: LazyTensor

    dtype, coded = BITS, None

    @property
    def shape(self) -> Shape:
        return self.scale.shape

    def read(self, part: Slices = ()) -> Tensor:
        made = offsets(self.scale.read(part), self.zero.read(part))
        assert made is not None
        return made.view(BITS)


def add_int4(found: Found, members: Members, leaf: str, kind: str, matrix: tuple[Shape, int], windows: Windows) -> None:
    """Add the parts PATH._LEAF_… of a tensor of this `kind`. `matrix`: its shape and the inputs of a group."""
    shape, size = matrix
    (out, inputs), groups = shape, shape[1] // size
    name = f"{members.path}.{leaf}"
    data = _data(members, f"_{leaf}_qdata", kind, shape)
    both = (_of_tiles if kind == TILES else _of_groups)(members, f"_{leaf}", kind, (out, groups), windows)
    if data is None or both is None or not members.are_sound:
        return
    scale, zero = both
    option, scales = scale_buffer(scale, has_float16=True)
    buffers: dict[str, LazyTensor] = {"data": data, "scale": scales}
    text = f"int4:{group_text(size, inputs)}"
    if kind == WORDS:  # zeros in sixteenths of a step, of codes less 8
        less = mapped(zero, torch.int8, lambda read: read - 8)
        values = Values(shape, data, of_integers(4), scale, regular_groups(inputs, size), less)
        buffers["zero"] = mapped(zero, torch.int8, lambda read: (read - 8) * 16)
        found.add(name, shape, f"{text}:asymmetric{option}", buffers, lambda: values)
        return
    values = Values(shape, data, of_integers(4), scale, regular_groups(inputs, size), offset=zero)
    if not bool(zero.read().any()):
        found.add(name, shape, f"{text}{option}", buffers, lambda: values)
        return
    if offsets(scale.read(), zero.read()) is None:
        found.dequantize(name, "float32 does not hold offsets of these scales and zeros", values)
        return
    buffers["offset"] = _Offsets(scale, zero)
    found.add(name, shape, f"{text}:offset{option}", buffers, lambda: values)


def _data(members: Members, leaf: str, kind: str, shape: Shape) -> LazyTensor | None:
    """The nibbles of int4, uint8 [out, in / 2]; None after a fault."""
    out, inputs = shape
    if kind == PLAIN:
        plain = members.take(leaf, (torch.int8, torch.uint8), (out, inputs // 2))
        return None if plain is None else Rows(plain, inputs // 2, torch.uint8, _unsigned, 1)
    if kind == WORDS:
        words = members.take(leaf, (torch.int32,), (out, inputs // 8))
        return None if words is None else Rows(words, inputs // 2, torch.uint8, _bytes, 4)
    tiles = members.take(leaf, (torch.int32,), (-1, -1, 32, 4))
    if tiles is None:
        return None
    if tiles.shape[0] < ceil_div(out, 8) or tiles.shape[1] < ceil_div(inputs, _PADDED):
        members.fault(leaf, f"is {tiles.shape}, too few tiles for {shape}")
        return None
    return Rows(TilePacked(tiles, shape), inputs // 2, torch.uint8, pack_nibbles)


def _of_groups(
    members: Members, leaf: str, kind: str, shape: Shape, windows: Windows
) -> tuple[LazyTensor, LazyTensor] | None:
    """Scales and zeros [out, groups] of two tensors [groups, out]; None after a fault."""
    scale = members.take(f"{leaf}_scale", FLOATS, shape[::-1])
    dtypes = (torch.int8,) if kind == WORDS else FLOATS
    zero = members.take(f"{leaf}_zero_point", dtypes, shape[::-1])
    if scale is None or zero is None:
        return None
    if kind == WORDS:
        low, high = (int(bound) for bound in torch.aminmax(zero.read()))
        if low < 0 or high > 15:
            members.fault(f"{leaf}_zero_point", f"holds {low} to {high}; possible: 0 to 15")
    return _turned(scale, shape, windows.scales), _turned(zero, shape, windows.zeros)


def _of_tiles(
    members: Members, leaf: str, kind: str, shape: Shape, windows: Windows
) -> tuple[LazyTensor, LazyTensor] | None:
    """Scales and zeros [out, groups] of one tensor [groups, out, 2] with padding; None after a fault."""
    both = members.take(f"{leaf}_scale_and_zero", FLOATS, (-1, -1, 2))
    if both is None:
        return None
    if both.shape[0] < shape[1] or both.shape[1] < shape[0]:
        members.fault(f"{leaf}_scale_and_zero", f"is {both.shape} for {shape[1]} groups of {shape[0]} outputs")
        return None
    scale, zero = (partial(_part, shape, which) for which in (0, 1))
    return (Kept(both, shape, both.dtype, scale, windows.scales), Kept(both, shape, both.dtype, zero, windows.zeros))


def _turned(source: FileTensor, shape: Shape, window: Window) -> LazyTensor:
    return Kept(source, shape, source.dtype, lambda read: read.t().contiguous(), window)


def _part(shape: Shape, which: int, read: Tensor) -> Tensor:
    return read[: shape[1], : shape[0], which].t().contiguous()


def _unsigned(read: Tensor) -> Tensor:
    return read.view(torch.uint8) ^ _SIGNS


def _bytes(words: Tensor) -> Tensor:
    return words.contiguous().view(torch.uint8)
