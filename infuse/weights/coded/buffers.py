"""Lazy buffers of number formats, made from the tensors of files: parts are read and rearranged as they are needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from infuse.ground.errors import CheckpointError, ConfigError
from infuse.quant.integer import pack_nibbles, unpack_nibbles
from infuse.quant.microscaling import scales_of_exponents
from infuse.quant.packing import pack_bits, unpack_bits
from infuse.weights.lazy import FileTensor, LazyTensor, Rearranged, Shape, Slices, of_all_axes

WINDOW = 4096  # columns of a file that are read at once to make rows: runs of 16 KiB, for words
NIBBLES = (-8, 7)  # codes, and zeros in steps, of int4
BITS = torch.int32  # float32 scales and offsets are kept as their bits


@dataclass(frozen=True)
class Rows:
    """A matrix whose rows `decode` makes of the rows of `source`.

    `each`: columns made of one source column, if columns can be made apart; 0 reads whole rows.
    """

    source: LazyTensor
    width: int
    dtype: torch.dtype
    decode: Callable[[Tensor], Tensor]
    each: int = 0

    coded = None

    @property
    def shape(self) -> Shape:
        return (self.source.shape[0], self.width)

    def read(self, part: Slices = ()) -> Tensor:
        rows, columns = of_all_axes(part, 2)
        if not self.each or columns == slice(None):
            return self.decode(self.source.read((rows,)))[:, : self.width][:, columns]
        start, stop, _ = columns.indices(self.width)
        first = start // self.each
        read = self.decode(self.source.read((rows, slice(first, -(-stop // self.each)))))
        return read[:, start - first * self.each : stop - first * self.each]


@dataclass(frozen=True)
class InRows(Rearranged):
    """The numbers of `source`, which lie row by row, as a matrix [rows, width]: each row has whole rows of `source`."""

    matrix: Shape

    @property
    def shape(self) -> Shape:
        return self.matrix

    def read(self, part: Slices = ()) -> Tensor:
        rows, columns = of_all_axes(part, 2)
        start, stop, _ = rows.indices(self.shape[0])
        each = self.shape[1] // math.prod(self.source.shape[1:])
        return self.source.read((slice(start * each, stop * each),)).reshape(-1, self.shape[1])[:, columns]


@dataclass(frozen=True)
class Tiled(Rearranged):
    """A matrix [rows, columns] that repeats each row of `source` `tall` times. A vector is a column."""

    tall: int
    rows: int

    @property
    def shape(self) -> Shape:
        return (self.rows, self.source.shape[1] if len(self.source.shape) > 1 else 1)

    def read(self, part: Slices = ()) -> Tensor:
        rows, columns = of_all_axes(part, 2)
        start, stop, _ = rows.indices(self.rows)
        first, last = start // self.tall, -(-stop // self.tall)
        read = self.source.read((slice(first, last),) if self.source.shape else ())
        tiles = read.reshape(read.numel() // self.shape[1], self.shape[1])[:, columns]
        return tiles if self.tall == 1 else tiles[torch.arange(start, stop) // self.tall - first]


@dataclass(frozen=True)
class Reordered(Rearranged):
    """Codes of `source`, [out, in * bits / 8], with the inputs in an `order`, int32 [in]."""

    order: Tensor

    def read(self, part: Slices = ()) -> Tensor:
        rows, columns = of_all_axes(part, 2)
        start, stop, _ = columns.indices(self.shape[1])
        bits, codes = 8 * self.shape[1] // len(self.order), self.source.read((rows,))
        inputs = self.order[start * 8 // bits : stop * 8 // bits]
        if bits == 8:
            return codes.index_select(1, inputs)
        if bits == 4:
            return pack_nibbles(unpack_nibbles(codes).index_select(1, inputs))
        return pack_bits(unpack_bits(codes, bits).index_select(1, inputs), bits)


@dataclass
class Window:
    """The rows that were made last of one kind of tensor, which are read in many parts."""

    of: Turned | Kept | None = None
    start: int = 0
    rows: Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass(frozen=True, eq=False)
class Turned:
    """A matrix that lies in the file by columns: `decode` makes `high` rows of each column of `source`.

    Columns are read a window at a time, since single ones would be read value by value.
    """

    source: LazyTensor
    shape: Shape
    dtype: torch.dtype
    decode: Callable[[Tensor], Tensor]
    window: Window
    high: int = 1

    coded = None

    def read(self, part: Slices = ()) -> Tensor:
        rows, columns = of_all_axes(part, 2)
        start, stop, _ = rows.indices(self.shape[0])
        each, pieces = WINDOW * self.high, []
        for first in range(start // each * each, max(stop, start + 1), each):
            made = self._made(first, min(first + each, self.shape[0]))
            pieces.append(made[max(start - first, 0) : stop - first, columns])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _made(self, start: int, stop: int) -> Tensor:
        window = self.window
        if window.of is not self or window.start != start:
            window.of, window.rows = None, torch.empty(0)  # free the memory before it is needed
            columns = slice(start // self.high, -(-stop // self.high))
            window.rows = self.decode(self.source.read((slice(None), columns)))
            window.of, window.start = self, start
        return window.rows


@dataclass(frozen=True, eq=False)
class Kept:
    """A small matrix that `decode` makes of the whole of `source`."""

    source: LazyTensor
    shape: Shape
    dtype: torch.dtype
    decode: Callable[[Tensor], Tensor]
    window: Window

    coded = None

    def read(self, part: Slices = ()) -> Tensor:
        if self.window.of is not self:
            self.window.rows = self.decode(self.source.read())
            self.window.of = self
        return self.window.rows[part] if part else self.window.rows


def without_nan(source: LazyTensor, of: FileTensor) -> Rows:
    """The bytes, uint8, of e4m3 numbers, which are checked as they are read. `of`: the tensor for errors."""

    def decode(read: Tensor) -> Tensor:
        codes = read.view(torch.uint8)
        if codes.numel() and int((codes & 127).amax()) == 127:
            raise CheckpointError(
                f"{of.file.path}: {of.name}: a number in e4m3 is NaN (0x7f or 0xff); get or quantize the file again"
            )
        return codes

    return Rows(source, source.shape[1], torch.uint8, decode, 1)


def mapped(source: LazyTensor, dtype: torch.dtype, of: Callable[[Tensor], Tensor]) -> Rows:
    """A matrix with `of` applied to each value."""
    return Rows(source, source.shape[1], dtype, of, 1)


def scale_buffer(scale: LazyTensor, *, has_float16: bool) -> tuple[str, LazyTensor]:
    """The option of a format, "", ":f16" or ":f32", that keeps these scales [out, groups], and its buffer."""
    if scale.dtype is torch.bfloat16:
        return "", scale
    if scale.dtype is torch.float16 and has_float16:
        return ":f16", scale
    return ":f32", mapped(scale, BITS, lambda read: read.float().view(BITS))


def powers_of_two(exponents: LazyTensor, of: FileTensor) -> Rows:
    """bfloat16 scales 2**(byte - 127), bytes as uint8 or float8_e8m0fnu, of the tensor `of`."""

    def decode(read: Tensor) -> Tensor:
        try:
            return scales_of_exponents(read.view(torch.uint8))
        except ConfigError as error:
            raise CheckpointError(f"{of.file.path}: {of.name}: {error}") from error

    return Rows(exponents, exponents.shape[1], torch.bfloat16, decode, 1)


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Unsigned codes, uint8 [R, n * 32 / bits], that lie densely in int32 words [R, n], lowest bits first."""
    return unpack_bits(words.contiguous().view(torch.uint8), bits)
