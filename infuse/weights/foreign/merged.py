"""Per-expert matrices of a checkpoint that the model holds as one stacked tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from infuse.weights.foreign.layout import Recognised, Unread
from infuse.weights.lazy import Coded, Composite, LazyTensor, Shape, Slices


@dataclass(frozen=True)
class Merged(Composite):
    """A tensor [experts, rows, columns]. `parts` has a sequence of matrices per expert, concatenated along their rows.

    All experts have the same number of parts, and their n-th parts have the same shape.
    """

    parts: Sequence[Sequence[LazyTensor]]

    @property
    def made_of(self) -> Iterable[LazyTensor]:
        return [part for parts in self.parts for part in parts]

    @property
    def coded(self) -> Coded | None:
        """The buffers of all experts, if all parts are stored in one format, and none in act-order."""
        stored = [_coded(parts) for parts in self.parts]
        formats = {coded.format if coded else None for row in stored for coded in row}
        first = stored[0][0]
        if first is None or len(formats) != 1 or self.has_orders:
            return None
        buffers = {
            name: Merged([[coded.buffers[name] for coded in row if coded] for row in stored]) for name in first.buffers
        }
        return Coded(first.format, buffers)

    @property
    def has_orders(self) -> bool:
        """Whether a part is stored in act-order. Experts have orders of their own, which one matrix cannot have."""
        return any(coded is not None and coded.order is not None for row in self.parts for coded in _coded(row))

    @property
    def shape(self) -> Shape:
        first = self.parts[0]
        return (len(self.parts), sum(part.shape[0] for part in first), *first[0].shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0][0].dtype

    def read(self, part: Slices = ()) -> Tensor:
        experts, rows, *columns = (*part, slice(None), slice(None))[: max(len(part), 2)]
        start, stop, _ = rows.indices(self.shape[1])
        return torch.stack([_expert(parts, start, stop, tuple(columns)) for parts in self.parts[experts]])


def _coded(parts: Iterable[LazyTensor]) -> list[Coded | None]:
    return [part.coded for part in parts]


def _expert(parts: Iterable[LazyTensor], start: int, stop: int, columns: Slices) -> Tensor:
    """Read rows [start, stop) of one expert from its parts."""
    pieces, at = [], 0
    for part in parts:
        rows = slice(max(start - at, 0), min(stop - at, part.shape[0]))
        at += part.shape[0]
        if rows.start < rows.stop:
            pieces.append(part.read((rows, *columns)))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def merged(unread: Unread) -> Recognised:
    """Recognise tensors that transformers' converters only stack and concatenate. Experts are sorted by number."""
    wanted = {name: shape for name, shape in unread.missing.items() if len(shape) == 3}
    members: dict[str, dict[int, list[str]]] = {}
    for name in unread.names if wanted else ():
        converter = unread.naming.converter(name)
        if converter is None or not converter.stacks:
            continue
        targets = [target for target in converter.targets if target in wanted]
        if targets:
            members.setdefault(targets[0], {}).setdefault(converter.place, []).append(name)
    tensors: dict[str, LazyTensor] = {}
    faults: dict[str, str] = {}
    for target, by_place in members.items():
        count, rows, *columns = wanted[target]
        ordered = [sorted(names, key=numbers_in) for _, names in sorted(by_place.items())]
        shape = (rows // len(ordered), *columns)
        parts = [[unread.checkpoint.joined(name, shape) for name in names] for names in ordered]
        fitting = [[part for part in of_place if part is not None] for of_place in parts]
        if all(len(names) == len(kept) == count for names, kept in zip(ordered, fitting, strict=True)):
            tensors[target] = Merged(tuple(zip(*fitting, strict=True)))
        else:
            shapes = {shape for names in ordered for name in names for shape in unread.checkpoint.pieces[name].shapes}
            what = f"{', '.join(map(str, sorted(map(len, ordered))))} parts of {', '.join(map(str, shapes))}"
            faults[target] = f"{what}, the model has {wanted[target]}"
    used = {name for by_place in members.values() for names in by_place.values() for name in names}
    return Recognised(tensors, used, faults)


def numbers_in(name: str) -> list[int]:
    """Numeric components of a dotted name: the indices of its layer and its expert."""
    return [int(number) for number in re.findall(r"(?<=\.)\d+(?=\.|$)", name)]
