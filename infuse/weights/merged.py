"""Tensors of a model that a checkpoint stores in many: each expert's matrices, which the model holds as one tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from infuse.weights.checkpoint import Checkpoint, Joined
from infuse.weights.pieces import Shape
from infuse.weights.reader import Slices
from infuse.weights.saved_shards import SavedShards


@dataclass(frozen=True)
class Merged:
    """A tensor [experts, rows, columns] from one row of `parts` for each expert, joined along their rows.

    All rows have as many parts. Parts at the same place in their rows have one shape.
    """

    parts: tuple[tuple[Joined, ...], ...]

    @property
    def shape(self) -> Shape:
        first = self.parts[0]
        return (len(self.parts), sum(part.shape[0] for part in first), *first[0].shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0][0].dtype

    def read(self, part: Slices = ()) -> Tensor:
        """Read the tensor, or `part` of it; only the bytes of the part are read."""
        experts, rows, *columns = (*part, slice(None), slice(None))[: max(len(part), 2)]
        start, stop, _ = rows.indices(self.shape[1])
        return torch.stack([self._expert(parts, start, stop, tuple(columns)) for parts in self.parts[experts]])

    def _expert(self, parts: Iterable[Joined], start: int, stop: int, columns: Slices) -> Tensor:
        found, at = [], 0
        for part in parts:
            own = slice(max(start - at, 0), min(stop - at, part.shape[0]))
            at += part.shape[0]
            if own.start < own.stop:
                found.append(part.read((own, *columns)))
        return found[0] if len(found) == 1 else torch.cat(found)


def merged(
    checkpoint: Checkpoint | SavedShards,
    names: Iterable[str],
    place: Callable[[str], tuple[str, int] | None],
    wanted: Mapping[str, Shape],
) -> tuple[dict[str, Merged], list[str], list[str]]:
    """The tensors of `wanted` shapes that are merged from `names`, the names that are left, and what does not fit.

    `place` maps a name to the tensor that it is a part of and its place among the parts of one expert. Experts are
    ordered by the numbers in their names.
    """
    grouped: dict[str, dict[int, list[str]]] = {}
    left, misshaped = [], []
    for name in names:
        found = place(name)
        if found is None or found[0] not in wanted:
            left.append(name)
        else:
            grouped.setdefault(found[0], {}).setdefault(found[1], []).append(name)
    made: dict[str, Merged] = {}
    for target, by_place in grouped.items():
        count, rows, *columns = wanted[target]
        columns_of = [sorted(members, key=numbers_in) for _, members in sorted(by_place.items())]
        shape = (rows // len(columns_of), *columns)
        parts = [[checkpoint.joined(name, shape, None) for name in members] for members in columns_of]
        if {len(members) for members in parts} == {count} and all(one is not None for own in parts for one in own):
            made[target] = Merged(tuple(zip(*parts, strict=True)))  # type: ignore[arg-type]
        else:
            found_shapes = {shape for members in columns_of for name in members for shape in _shapes(checkpoint, name)}
            what = f"{', '.join(map(str, sorted(map(len, columns_of))))} parts of {', '.join(map(str, found_shapes))}"
            misshaped.append(f"{target}: {what}, the model has {wanted[target]}")
    return made, left, misshaped


def _shapes(checkpoint: Checkpoint | SavedShards, name: str) -> tuple[Shape, ...]:
    return checkpoint.pieces[name].shapes


def numbers_in(name: str) -> list[int]:
    """The numbers between dots in a name: those of its layer and its expert."""
    return [int(number) for number in re.findall(r"(?<=\.)\d+(?=\.|$)", name)]
