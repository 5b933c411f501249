"""Read tensors with one slice for each expert as tall matrices, and turn tall matrices into such tensors again."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from infuse.architectures.packing import Fill, StackedExperts
from infuse.weights.reader import Coded, Reader, Slices


def stacked_reader(fill: Fill, reader: Reader) -> Reader:
    """Reader of the source of `fill` as a tall matrix; `reader` itself if the fill has no such source."""
    return reader if fill.stacked is None else _StackedReader(fill.stacked, reader)


class _StackedReader:
    """Shows sources [experts, rows, columns] as [experts * rows, columns], and [experts, rows] as [experts * rows]."""

    def __init__(self, stacked: StackedExperts, reader: Reader):
        self._stacked, self._reader = stacked, reader
        self._kept: tuple[str, int, Tensor | None] = "", 0, None

    def shape(self, name: str) -> tuple[int, ...]:
        count, rows, *columns = self._sizes(name)
        return (count * rows, *columns)

    def read(self, name: str, part: Slices = ()) -> Tensor:
        count, rows, *_ = self._sizes(name)
        start, stop, _ = (part[0] if part else slice(None)).indices(count * rows)
        runs = _runs(start, stop, rows)
        if self._stacked != StackedExperts():
            pieces = (self._slice(name, expert)[own] for expert, own in runs)
            return _joined([piece[:, part[1]] if len(part) > 1 else piece for piece in pieces])
        if (start, stop) == (0, count * rows):
            whole = self._reader.read(name, (slice(None), slice(None), part[1]) if len(part) > 1 else ())
            return whole.flatten(0, 1)
        return _joined(
            [self._reader.read(name, (slice(expert, expert + 1), own, *part[1:]))[0] for expert, own in runs]
        )

    def coded(self, name: str) -> Coded | None:
        return None

    def _sizes(self, name: str) -> tuple[int, ...]:
        shape = self._reader.shape(name)
        if self._stacked.flat:
            shape = (self._stacked.flat, shape[0] // self._stacked.flat, *shape[1:])
        return (shape[0], shape[2], shape[1]) if self._stacked.transposed else shape

    def _slice(self, name: str, expert: int) -> Tensor:
        """One expert's rows in the target's order. The last one is kept: parts of it are asked for in a row."""
        if self._kept[:2] != (name, expert) or self._kept[2] is None:
            if self._stacked.flat:
                rows = self._reader.shape(name)[0] // self._stacked.flat
                found = self._reader.read(name, (slice(expert * rows, (expert + 1) * rows),))
            else:
                found = self._reader.read(name, (slice(expert, expert + 1),))[0]
            found = found.t() if self._stacked.transposed else found
            if self._stacked.interleaved:
                found = torch.cat([found[0::2], found[1::2]])
            self._kept = name, expert, found
        assert self._kept[2] is not None
        return self._kept[2]


def sliced(stacked: StackedExperts, target: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The source of `shape` that makes the tall matrix `target`: a view of it if only the shapes differ."""
    if stacked.flat:
        each = (stacked.flat, shape[0] // stacked.flat, *shape[1:])
        return sliced(replace(stacked, flat=0), target, each).flatten(0, 1)
    rows = shape[2] if stacked.transposed else shape[1]
    found = target.view(shape[0], rows, *target.shape[1:])
    if stacked.interleaved:
        found = found.unflatten(1, (2, rows // 2)).transpose(1, 2).flatten(1, 2)
    return found.transpose(1, 2).contiguous() if stacked.transposed else found


def _runs(start: int, stop: int, rows: int) -> list[tuple[int, slice]]:
    """The experts that own the rows from start to stop of a tall matrix, each with its own rows among them."""
    return [
        (expert, slice(max(start - expert * rows, 0), min(stop - expert * rows, rows)))
        for expert in range(start // rows, -(-stop // rows))
    ]


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
