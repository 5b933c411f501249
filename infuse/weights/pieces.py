"""How the pieces that ranks saved of one tensor make it up: runs of pieces along one axis, in order.

A piece of a plain matrix is a range of its rows (column-parallel) or columns (row-parallel); which one the shapes tell.
A matrix that packs q, k and v, or gate and up, was cut inside each of them, and keys that are fewer than ranks were
replicated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from infuse.architectures.packing import BLOCKS, PER_GROUP, PER_HEAD, Heads

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Packed:
    """What lies along the axis of a packed tensor: `groups` times neighbours of these `widths`."""

    widths: tuple[int, ...]
    groups: int = 1


@dataclass(frozen=True)
class Run:
    """Positions start to stop, along the axis, of the piece of `rank`."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """The runs that make up a tensor along `axis`."""

    axis: int
    runs: tuple[Run, ...]

    def part(self, start: int, stop: int) -> Iterator[Run]:
        """The runs that hold positions start to stop of the whole."""
        at = 0
        for run in self.runs:
            length = run.stop - run.start
            first, last = max(start - at, 0), min(stop - at, length)
            if first < last:
                yield Run(run.rank, run.start + first, run.start + last)
            at += length


def packed_qkv(packing: str | None, heads: Heads) -> Packed | None:
    """What lies along the rows of a packed q, k, v; None for packings of which no sharded form is known."""
    h, k, d = heads.query, heads.key, heads.width
    if packing in (None, BLOCKS):
        return Packed((h * d, k * d, k * d))
    if packing == PER_HEAD:
        return Packed((d, d, d), h)
    return Packed((h // k * d, d, d), k) if packing == PER_GROUP else None


def layout(shapes: Sequence[Shape], wanted: Shape, packed: Packed | None = None) -> Layout | None:
    """How pieces of `shapes`, one for each rank, make up a tensor of shape `wanted`; None where they do not."""
    if all(shape == wanted for shape in shapes):  # the only piece, or a replica on each rank
        return Layout(0, (Run(0, 0, wanted[0] if wanted else 1),))
    axes = {axis for shape in shapes for axis, (a, b) in enumerate(zip(shape, wanted, strict=False)) if a != b}
    if len(axes) != 1 or any(len(shape) != len(wanted) for shape in shapes):
        return None
    axis = axes.pop()
    lengths, whole = [shape[axis] for shape in shapes], wanted[axis]
    if packed is not None and sum(packed.widths) * packed.groups == whole:
        runs = _packed_runs(lengths, packed)
    else:
        runs = _plain_runs(lengths, whole)
    return Layout(axis, tuple(runs)) if runs and sum(run.stop - run.start for run in runs) == whole else None


def _plain_runs(lengths: Sequence[int], whole: int) -> list[Run]:
    """Whole pieces one after the other; where neighbours hold the same (replicated keys), the first of them."""
    copies = sum(lengths) // whole if sum(lengths) % whole == 0 and len(set(lengths)) == 1 else 1
    return [Run(rank, 0, lengths[rank]) for rank in range(0, len(lengths), copies)]


def _packed_runs(lengths: Sequence[int], packed: Packed) -> list[Run]:
    ranks, groups = len(lengths), packed.groups
    if groups > 1 and sum(lengths) == groups * sum(packed.widths):
        return [Run(rank, 0, length) for rank, length in enumerate(lengths)]  # whole groups on each rank
    if ranks % groups:
        return []
    each = ranks // groups
    return [
        run
        for first in range(0, ranks, each)
        for run in _one_group(first, lengths[first : first + each], packed.widths)
    ]


def _one_group(first: int, lengths: Sequence[int], widths: tuple[int, ...]) -> list[Run]:
    """One group of `widths` over the ranks from `first` on: all of the first block, then all of the second, and so on."""
    ranks, parts = len(lengths), len(widths)
    if len(set(widths)) == 1 and sum(lengths) == sum(widths) and all(length % parts == 0 for length in lengths):
        each = [[length // parts] * parts for length in lengths]  # by heads, uneven numbers of them too
        return [Run(first + r, b * each[r][b], (b + 1) * each[r][b]) for b in range(parts) for r in range(ranks)]
    for copies in (n for n in range(1, ranks + 1) if ranks % n == 0):  # keys and values lie `copies` times
        sizes = [widths[0] // ranks, *(width * copies // ranks for width in widths[1:])]
        exact = widths[0] % ranks == 0 and all(width * copies % ranks == 0 for width in widths[1:])
        if exact and all(length == sum(sizes) for length in lengths):
            starts = [sum(sizes[:b]) for b in range(parts)]
            return [
                Run(first + r, starts[b], starts[b] + sizes[b])
                for b in range(parts)
                for r in range(0, ranks, copies if b else 1)
            ]
    return []
