"""TallMatrix reads a tensor with one slice per expert as a matrix; `shared_experts` is the inverse."""

from __future__ import annotations

import torch
from torch import Tensor

from infuse.architectures.packing import StackedExperts
from infuse.weights.lazy import Coded, LazyTensor, Shape, Slices


class TallMatrix:
    """A source [experts, rows, columns] as [experts * rows, columns], and [experts, rows] as [experts * rows]."""

    def __init__(self, stacked: StackedExperts, source: LazyTensor):
        self._stacked, self._source = stacked, source
        self._last: tuple[int, Tensor] | None = None  # the expert read last, and its rows

    @property
    def shape(self) -> Shape:
        count, rows, *columns = self._sizes
        return (count * rows, *columns)

    @property
    def dtype(self) -> torch.dtype:
        return self._source.dtype

    @property
    def coded(self) -> Coded | None:
        coded = self._source.coded
        if coded is None or coded.order is not None:
            return None
        buffers: dict[str, LazyTensor] = {
            name: TallMatrix(self._stacked, buffer) for name, buffer in coded.buffers.items()
        }
        return Coded(coded.format, buffers)

    def read(self, part: Slices = ()) -> Tensor:
        count, rows, *_ = self._sizes
        start, stop, _ = (part[0] if part else slice(None)).indices(count * rows)
        runs = _runs(start, stop, rows)
        if self._stacked != StackedExperts():
            pieces = (self._expert(expert)[within] for expert, within in runs)
            return _joined([piece[:, part[1]] if len(part) > 1 else piece for piece in pieces])
        if (start, stop) == (0, count * rows):
            whole = self._source.read((slice(None), slice(None), part[1]) if len(part) > 1 else ())
            return whole.flatten(0, 1)
        experts = ((slice(expert, expert + 1), within) for expert, within in runs)
        return _joined([self._source.read((*slices, *part[1:]))[0] for slices in experts])

    @property
    def _sizes(self) -> Shape:
        shape = self._source.shape
        if self._stacked.flat:
            shape = (self._stacked.flat, shape[0] // self._stacked.flat, *shape[1:])
        return (shape[0], shape[2], shape[1]) if self._stacked.transposed else shape

    def _expert(self, expert: int) -> Tensor:
        """Read one expert's rows in the target's order. The last expert is cached, as its parts are read one by one."""
        if self._last is None or self._last[0] != expert:
            self._last = None  # free the memory before it is needed
            if self._stacked.flat:
                rows = self._source.shape[0] // self._stacked.flat
                matrix = self._source.read((slice(expert * rows, (expert + 1) * rows),))
            else:
                matrix = self._source.read((slice(expert, expert + 1),))[0]
            matrix = matrix.t() if self._stacked.transposed else matrix
            if self._stacked.interleaved:
                matrix = torch.cat([matrix[0::2], matrix[1::2]])
            self._last = expert, matrix
        return self._last[1]


def shared_experts(stacked: StackedExperts, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of a contiguous source and of the tall matrix `target` that have the same values."""
    if stacked.flat:
        source = source.unflatten(0, (stacked.flat, -1))
    if stacked.transposed:
        source = source.transpose(1, 2)
    held = target.view(source.shape)
    if stacked.interleaved:
        return source.unflatten(1, (-1, 2)), held.unflatten(1, (2, -1)).transpose(1, 2)
    return source, held


def _runs(start: int, stop: int, rows: int) -> list[tuple[int, slice]]:
    """Split rows [start, stop) of a tall matrix by expert: each expert and the range of its own rows."""
    return [
        (expert, slice(max(start - expert * rows, 0), min(stop - expert * rows, rows)))
        for expert in range(start // rows, -(-stop // rows))
    ]


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
