"""Intervals along one axis of a matrix: each rank's part, its place in the whole, and the whole from the parts.

Pure numbers, for any number of ranks, including those that do not divide the axis.

column  splits the outputs of a matrix (q, k, v, gate, up): no rank needs another's part.
row     splits the inputs (attention's out, the MLP's down): ranks add up what they get.
heads   a column split in which a rank has whole query heads and the key/value heads that they look at.
vocabulary  a column split of the head, the same rows of the embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Range = tuple[int, int]


@dataclass(frozen=True)
class Span:
    """Positions start to stop of one source: a tensor, or a rank's part."""

    source: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Cut:
    """A rank's part of a target tensor: the positions `ranges`, in order, along `axis` (0 outputs, 1 inputs).

    The whole is what one rank alone would hold; `sizes` are the lengths of its sources along that axis. `rows`: the
    part has only these positions along axis 0, which is then not `axis`.
    """

    axis: int
    ranges: tuple[Range, ...]
    sizes: tuple[int, ...]
    rows: Range | None = None

    @property
    def length(self) -> int:
        return total(self.ranges)

    @property
    def whole_length(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True)
class Tiling:
    """The ranges that each rank has of `length` positions along `axis`, in the order in which it has them."""

    axis: int
    length: int
    parts: tuple[tuple[Range, ...], ...]

    def part_length(self, rank: int) -> int:
        return total(self.parts[rank])

    def spans(self, first: int = 0) -> tuple[Span, ...]:
        """Return the spans that make up the whole. Where ranks overlap, prefer `first`, then the lowest.

        Raise ValueError if no rank has a position.
        """
        spans: list[Span] = []
        at = 0
        while at < self.length:
            piece = next((span for rank in (first, *range(len(self.parts))) if (span := self._from(rank, at))), None)
            if piece is None:
                raise ValueError(f"position {at} of {self.length} is on no rank")
            stop = min([at + piece.length, *(start for start, _ in self.parts[first] if start > at)])
            spans.append(Span(piece.source, piece.start, piece.start + stop - at))
            at = stop
        return tuple(spans)

    def _from(self, rank: int, at: int) -> Span | None:
        """Return the part of `rank` from position `at` of the whole to the end of that range."""
        before = 0
        for start, stop in self.parts[rank]:
            if start <= at < stop:
                return Span(rank, before + at - start, before + stop - start)
            before += stop - start
        return None


@dataclass(frozen=True)
class Band:
    """How ranks tile the rows `rows` of a tensor; None: all of it."""

    rows: Range | None
    tiling: Tiling


def bands_of(cuts: Sequence[Cut | None]) -> tuple[Band, ...]:
    """Return the bands of a tensor from each rank's part (None: no part).

    There are several only if ranks split its rows as well as its inputs. Raise ValueError if the parts do not make up
    a tensor.
    """
    there = [cut for cut in cuts if cut is not None]
    if len({(cut.axis, cut.whole_length, cut.rows is None) for cut in there}) != 1:
        raise ValueError("it is not cut alike on all ranks")
    every = tuple(sorted({cut.rows for cut in there if cut.rows is not None}))
    if [start for start, _ in every] != [0, *(stop for _, stop in every)][:-1]:
        raise ValueError(f"ranks have the rows {every}, which do not follow each other")
    bands = []
    for rows in every or (None,):
        parts = tuple(cut.ranges if cut is not None and cut.rows == rows else () for cut in cuts)
        bands.append(Band(rows, Tiling(there[0].axis, there[0].whole_length, parts)))
        bands[-1].tiling.spans()
    return tuple(bands)


def are_along(bands: Sequence[Band], cut: Cut) -> bool:
    """True if ranks split the tensor along the axis of `cut` alone, or not at all, so that ranges describe the part."""
    return not bands or (cut.rows is None and bands[0].rows is None and bands[0].tiling.axis == cut.axis)


def total(ranges: Iterable[Range]) -> int:
    """Return the number of positions."""
    return sum(stop - start for start, stop in ranges)


def taken(spans: Sequence[Span], ranges: Iterable[Range]) -> list[Span]:
    """Return the spans of `ranges` in the concatenation of `spans`, merging neighbours in a source."""
    pieces: list[Span] = []
    for start, stop in ranges:
        at = 0
        for span in spans:
            first, last = span.start + max(start - at, 0), span.start + min(stop - at, span.length)
            at += span.length
            if first >= last:
                continue
            if pieces and (pieces[-1].source, pieces[-1].stop) == (span.source, first):
                first = pieces.pop().start
            pieces.append(Span(span.source, first, last))
    return pieces


@dataclass(frozen=True)
class HeadShare:
    """The query heads of a rank, and the key/value heads that they look at."""

    heads: Range
    kv_heads: Range


def split(total: int, size: int, *, grain: int = 1, multiple: int = 1) -> tuple[Range, ...]:
    """Split `total` into neighbouring ranges for `size` ranks, as even as possible in steps of `grain`.

    If the grain does not divide, or gives a rank nothing, it is halved as often as needed; `multiple` (the group of
    a number format) is kept as long as it divides.
    """
    unit = next(unit for unit in _units(grain, multiple) if total % unit == 0 and (total // unit >= size or unit == 1))
    each, more = divmod(total // unit, size)
    stops = [unit * (each * (rank + 1) + min(rank + 1, more)) for rank in range(size)]
    return tuple(zip([0, *stops[:-1]], stops, strict=True))


def _units(grain: int, multiple: int) -> list[int]:
    grains = [grain]
    while grains[-1] % 2 == 0:
        grains.append(grains[-1] // 2)
    return [*(math.lcm(unit, multiple) for unit in grains), multiple, *grains, 1]


def split_heads(heads: int, kv_heads: int, size: int) -> tuple[HeadShare, ...] | None:
    """The heads of each rank: whole groups if there are enough, else ranks share a key/value head. None: too few."""
    if size > heads:
        return None
    group = heads // kv_heads
    if kv_heads >= size:
        return tuple(HeadShare((first * group, last * group), (first, last)) for first, last in split(kv_heads, size))
    shares = []
    for kv_head, (first, last) in enumerate(split(size, kv_heads)):
        for start, stop in split(group, last - first):
            shares.append(HeadShare((kv_head * group + start, kv_head * group + stop), (kv_head, kv_head + 1)))
    return tuple(shares)
