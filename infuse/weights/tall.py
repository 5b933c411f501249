"""Read tensors with one slice for each expert as tall matrices, and turn tall matrices into such tensors again."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from infuse.architectures.packing import Fill, Tall
from infuse.weights.reader import Coded, Reader, Slices


def tall_reader(fill: Fill, reader: Reader) -> Reader:
    """Reader of the source of `fill` as a tall matrix; `reader` itself if the fill has no such source."""
    return reader if fill.tall is None else _TallReader(fill.tall, reader)


class _TallReader:
    """Shows sources [experts, rows, columns] as [experts * rows, columns], and [experts, rows] as [experts * rows]."""

    def __init__(self, tall: Tall, reader: Reader):
        self._tall, self._reader = tall, reader
        self._kept: tuple[str, int, Tensor | None] = "", 0, None

    def shape(self, name: str) -> tuple[int, ...]:
        count, rows, *columns = self._sizes(name)
        return (count * rows, *columns)

    def read(self, name: str, part: Slices = ()) -> Tensor:
        count, rows, *_ = self._sizes(name)
        start, stop, _ = (part[0] if part else slice(None)).indices(count * rows)
        runs = _runs(start, stop, rows)
        if self._tall != Tall():
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
        if self._tall.flat:
            shape = (self._tall.flat, shape[0] // self._tall.flat, *shape[1:])
        return (shape[0], shape[2], shape[1]) if self._tall.transposed else shape

    def _slice(self, name: str, expert: int) -> Tensor:
        """One expert's rows in the target's order. The last one is kept: parts of it are asked for in a row."""
        if self._kept[:2] != (name, expert) or self._kept[2] is None:
            if self._tall.flat:
                rows = self._reader.shape(name)[0] // self._tall.flat
                found = self._reader.read(name, (slice(expert * rows, (expert + 1) * rows),))
            else:
                found = self._reader.read(name, (slice(expert, expert + 1),))[0]
            found = found.t() if self._tall.transposed else found
            if self._tall.interleaved:
                found = torch.cat([found[0::2], found[1::2]])
            self._kept = name, expert, found
        assert self._kept[2] is not None
        return self._kept[2]


def sliced(tall: Tall, target: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The source of `shape` that makes the tall matrix `target`: a view of it if only the shapes differ."""
    if tall.flat:
        each = (tall.flat, shape[0] // tall.flat, *shape[1:])
        return sliced(replace(tall, flat=0), target, each).flatten(0, 1)
    rows = shape[2] if tall.transposed else shape[1]
    found = target.view(shape[0], rows, *target.shape[1:])
    if tall.interleaved:
        found = found.unflatten(1, (2, rows // 2)).transpose(1, 2).flatten(1, 2)
    return found.transpose(1, 2).contiguous() if tall.transposed else found


def _runs(start: int, stop: int, rows: int) -> list[tuple[int, slice]]:
    """The experts that own the rows from start to stop of a tall matrix, each with its own rows among them."""
    return [
        (expert, slice(max(start - expert * rows, 0), min(stop - expert * rows, rows)))
        for expert in range(start // rows, -(-stop // rows))
    ]


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
