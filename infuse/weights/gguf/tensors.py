"""LazyTensors of a GGUF file: matrices of blocks as codes and scales, and the rearrangements that undo llama.cpp's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from infuse.ground.errors import CheckpointError, ConfigError
from infuse.quant.format import Buffer
from infuse.quant.parse import quant_format
from infuse.weights.gguf.blocks import FORMATS, split_blocks
from infuse.weights.gguf.file import PLAIN, GGUFFile
from infuse.weights.lazy import (
    Coded,
    CodedTensor,
    Composite,
    FileTensor,
    LazyTensor,
    Rearranged,
    Shape,
    Slices,
    coded_together,
    of_all_axes,
)

PART_VALUES = 1 << 20  # values converted per step, to keep the temporaries in a core's cache

Wrap = Callable[[LazyTensor], LazyTensor]


def matrix(
    file: GGUFFile,
    name: str,
    wrap: Wrap = lambda tensor: tensor,
    *,
    rows: slice = slice(None),
    factor: LazyTensor | None = None,
) -> LazyTensor:
    """The tensor `name`, or `rows` of it with all axes but the last flattened, rearranged by `wrap`, which moves rows.

    A tensor of blocks is always flattened to a matrix. `factor`, a float32 number, multiplies a matrix in NVFP4.
    """
    entry = file.entries[name]
    first, stop, _ = rows.indices(entry.rows)
    if entry.type in PLAIN and rows == slice(None):
        return wrap(FileTensor(file, name))
    if entry.type in PLAIN:
        return wrap(_PlainRows(file, name, first, stop - first))
    text, inputs = FORMATS[entry.type], entry.shape[-1]
    blocks = _Blocks(file, name, first, stop - first, factor)
    buffers = {buffer.name: wrap(_BlockBuffer(blocks, buffer, inputs)) for buffer in quant_format(text).buffers(inputs)}
    return CodedTensor((stop - first, inputs), torch.float32, Coded(text, buffers))


class _Blocks:
    """Rows of a matrix of blocks. One conversion makes both buffers; the second is cached until it is read."""

    def __init__(self, file: GGUFFile, name: str, first: int, rows: int, factor: LazyTensor | None):
        self.file, self.name, self.first, self.rows, self._factor = file, name, first, rows, factor
        self._kept: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def read(self, buffer: str, start: int, stop: int, first_block: int, stop_block: int) -> Tensor:
        """The `buffer` of these rows and blocks, a tensor that the caller may keep."""
        part = (start, stop, first_block, stop_block)
        kept, self._kept = self._kept, {}
        if (last := kept.pop((buffer, part), None)) is not None:
            return last
        entry = self.file.entries[self.name]
        step = max(PART_VALUES // max(entry.shape[-1], 1), 1)
        columns = slice(first_block * entry.block_bytes, stop_block * entry.block_bytes)
        pieces: list[tuple[Tensor, Tensor]] = []
        for row in range(start, max(stop, start + 1), step):
            raw = self.file.blocks(self.name, self.first + row, self.first + min(row + step, stop))
            try:
                pieces.append(split_blocks(raw[:, columns], entry.type))
            except ConfigError as error:
                raise CheckpointError(f"{self.file.path}: {self.name}, from row {row} on: {error}") from error
        data, scale = (_joined([piece[place] for piece in pieces]) for place in range(2))
        if self._factor is not None:
            scale.view(len(scale), -1, 8)[..., :4] = self._factor.read().view(torch.uint8)
        if buffer == "data":
            self._kept = {("scale", part): scale}
            return data
        self._kept = {("data", part): data}
        return scale


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


@dataclass(frozen=True, eq=False)
class _BlockBuffer:
    """One buffer, [rows, width], of a matrix of blocks with `inputs` columns."""

    blocks: _Blocks
    buffer: Buffer
    inputs: int

    coded = None

    @property
    def shape(self) -> Shape:
        return (self.blocks.rows, self.buffer.width(self.inputs))

    @property
    def dtype(self) -> torch.dtype:
        return self.buffer.dtype

    def read(self, part: Slices = ()) -> Tensor:
        rows, columns = of_all_axes(part, 2)
        start, stop, _ = rows.indices(self.blocks.rows)
        first, last, _ = columns.indices(self.shape[1])
        entry = self.blocks.file.entries[self.blocks.name]
        width = self.buffer.width(entry.block_values)  # columns of a block
        first_block, stop_block = first // width, -(-last // width)
        tensor = self.blocks.read(self.buffer.name, start, max(stop, start), first_block, max(stop_block, first_block))
        return tensor[:, first - first_block * width : last - first_block * width]


@dataclass(frozen=True)
class _PlainRows:
    """`count` rows from `first` on of a tensor of plain numbers with all axes but the last flattened."""

    file: GGUFFile
    name: str
    first: int
    count: int

    coded = None

    @property
    def shape(self) -> Shape:
        return (self.count, self.file.entries[self.name].shape[-1])

    @property
    def dtype(self) -> torch.dtype:
        return PLAIN[self.file.entries[self.name].type]

    def read(self, part: Slices = ()) -> Tensor:
        rows, columns = of_all_axes(part, 2)
        start, stop, _ = rows.indices(self.count)
        raw = self.file.blocks(self.name, self.first + start, self.first + max(stop, start))
        return raw.view(self.dtype)[:, columns]


@dataclass(frozen=True)
class Unpermuted(Rearranged):
    """Undo llama.cpp's row permutation per head: rotary pairs (0, 1), (2, 3), ... back to halves."""

    heads: int

    def read(self, part: Slices = ()) -> Tensor:
        rows, *columns = of_all_axes(part, len(self.shape))
        start, stop, _ = rows.indices(self.shape[0])
        size = self.shape[0] // self.heads
        first, last = start // size * size, -(-stop // size) * size
        stored = self.source.read((slice(first, last), *columns))
        values = stored.view(-1, size // 2, 2, *stored.shape[1:]).transpose(1, 2).reshape(stored.shape)
        return values[start - first : stop - first]


@dataclass(frozen=True)
class Shifted(Rearranged):
    """`source` plus a number, in float32."""

    by: float

    dtype = torch.float32

    def read(self, part: Slices = ()) -> Tensor:
        return self.source.read(part).float() + self.by


@dataclass(frozen=True)
class Viewed(Rearranged):
    """`source`, which is small and plain, in another shape; with `index`, one entry of its first axis."""

    whole: Shape
    index: int | None = None

    @property
    def shape(self) -> Shape:
        return self.whole if self.index is None else self.whole[1:]

    def read(self, part: Slices = ()) -> Tensor:
        values = self.source.read().reshape(self.whole)
        return (values if self.index is None else values[self.index])[part]


@dataclass(frozen=True)
class Frequencies:
    """Rotary frequencies for `base`, divided elementwise by `factors`. `context`: tokens of the model."""

    factors: LazyTensor
    base: float
    context: int

    coded, dtype = None, torch.float32

    @property
    def shape(self) -> Shape:
        return self.factors.shape

    def read(self, part: Slices = ()) -> Tensor:
        count = self.shape[0]
        exponents = torch.arange(count, dtype=torch.float32) / count
        return (1.0 / self.base**exponents / self.factors.read().float())[part]


@dataclass(frozen=True)
class Alternating(Composite):
    """Rows of two tensors, interleaved: even[0], odd[0], even[1], ..."""

    even: LazyTensor
    odd: LazyTensor

    @property
    def made_of(self) -> Iterable[LazyTensor]:
        return (self.even, self.odd)

    @property
    def shape(self) -> Shape:
        rows, *columns = self.even.shape
        return (2 * rows, *columns)

    @property
    def dtype(self) -> torch.dtype:
        return self.even.dtype

    @property
    def coded(self) -> Coded | None:
        return coded_together([self.even, self.odd], lambda buffers: Alternating(*buffers))

    def read(self, part: Slices = ()) -> Tensor:
        rows, *columns = of_all_axes(part, len(self.shape))
        start, stop, _ = rows.indices(self.shape[0])
        first, last = start // 2, -(-stop // 2)
        both = [source.read((slice(first, last), *columns)) for source in (self.even, self.odd)]
        return torch.stack(both, dim=1).flatten(0, 1)[start - 2 * first : stop - 2 * first]
