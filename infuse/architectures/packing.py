"""Row orders of packed query, key and value matrices, and how a target tensor is made from source tensors.

Packed matrices are split into q, k, v first and merged again in one order, [q | k | v] by heads, so grouped queries,
shards and quantization never see an interleaving. Rows are the first axis of weights [rows, in] and biases [rows].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from infuse.architectures.part import named
from infuse.parallel.slices import Cut, Range, Span, taken, total

BLOCKS = "blocks"  # [q: H D | k: K D | v: K D]: GPT-2, Phi-3, MPT
PER_HEAD = "per head"  # [head: (q D | k D | v D)] x H: BLOOM, GPT-NeoX
PER_GROUP = "per group"  # [group: (q D x H/K | k D | v D)] x K: Falcon 40B, InternLM2
FOUR_PARTS = "four parts"  # [part: (q | v | k)] x 4: CodeGen, sharded this way for training on TPUs
SWAPPED = "swapped"  # [second half | first half] of "heads" without keys: diffusers' GEGLU has [up | gate]
BY_EXPERT = "by expert"  # two sources [expert: D] x E become [expert: (gate D | up D)] x E: DBRX
PACKINGS = (BLOCKS, PER_HEAD, PER_GROUP, FOUR_PARTS, SWAPPED)

CAT, STACK = "cat", "stack"


@dataclass(frozen=True)
class Heads:
    """Head counts for a packing: H query heads and K key/value heads of width D."""

    query: int
    key: int
    width: int

    @property
    def rows(self) -> int:
        return sum(self.of_parts)

    @property
    def of_parts(self) -> tuple[int, int, int]:
        """Rows of q, k and v."""
        return self.query * self.width, self.key * self.width, self.key * self.width


@dataclass(frozen=True)
class StackedExperts:
    """The layout of a source [experts, rows, columns], all slices of which make one tall matrix, one below the other.

    Biases have no columns. `transposed` slices are stored [columns, rows]. `interleaved` rows alternate between gate
    and up; those of the target are [gate | up]. `flat`: the number of experts of a source [experts * rows, columns].
    """

    transposed: bool = False
    interleaved: bool = False
    flat: int = 0


@dataclass(frozen=True)
class Part:
    """Part `number` of the merged matrix `matrix` (its path), kept as a matrix of its own: sources in one format.

    `rows` are its rows in the merged matrix, in order.
    """

    matrix: str
    number: int
    rows: tuple[Range, ...]

    @property
    def outputs(self) -> int:
        return total(self.rows)

    @property
    def path(self) -> str:
        """Path of the part's own linear."""
        return f"{self.matrix}.{self.number}" if self.matrix else str(self.number)


@dataclass(frozen=True)
class Fill:
    """How one target tensor of a step is made from source tensors.

    `target` is a name under the new module, `sources` are names under the replaced one. One source with a `packing` is
    split into q, k, v. Several sources are merged: `merge` concatenates them along the first axis (CAT) or stacks them
    along a new one (STACK). A source of experts has the layout `stacked`. `cut` is the rank's part. `format` names a
    quantization format; None keeps the compute dtype. `exact`: it stays in float32 in models of 16 bits. `absent`: the
    biases of q, k and v that have no source, and are zeros. `pointwise`: the source is the weight of a convolution of
    one frame, [out, in, 1]. `rows`: the spans of the sources of which the target is made, in order. `flat`: the source
    has further axes of one entry, [1, 1, heads, 1], and the target is a vector. `part`: the target is that part of a
    merged matrix, or its bias. `as_stored`: the sources are stored in `format`, so that their codes are copied.
    `ordered`: the codes have the inputs in another order, that of the sources (act-order).
    """

    target: str
    sources: tuple[str, ...]
    transposed: bool = False
    packing: str | None = None
    heads: Heads | None = None
    merge: str = CAT
    format: str | None = None
    cut: Cut | None = None
    stacked: StackedExperts | None = None
    exact: bool = False
    absent: tuple[int, ...] = ()
    pointwise: bool = False
    rows: tuple[Span, ...] = ()
    flat: bool = False
    part: Part | None = None
    as_stored: bool = False
    ordered: bool = False

    @property
    def merged(self) -> int:
        """How many tensors are merged, those of zeros too."""
        return len(self.sources) + len(self.absent)


def block_starts(packing: str, heads: Heads) -> list[int]:
    """First row of each head's D rows in the packed matrix: all query heads, then all keys, then all values."""
    h, k, d = heads.query, heads.key, heads.width
    if packing == BLOCKS:
        blocks = list(range(h + 2 * k))
    elif packing == SWAPPED:
        blocks = list(reversed(range(h)))
    elif packing == PER_HEAD:
        blocks = [3 * head + part for part in range(3) for head in range(h)]
    elif packing == PER_GROUP:
        each = h // k
        queries = [(each + 2) * (head // each) + head % each for head in range(h)]
        blocks = [*queries, *((each + 2) * group + each + part for part in range(2) for group in range(k))]
    else:
        assert packing == FOUR_PARTS and h % 4 == 0, (packing, heads)
        each = h // 4
        blocks = [(3 * (head // each) + part) * each + head % each for part in (0, 2, 1) for head in range(h)]
    return [block * d for block in blocks]


def spans(fill: Fill) -> list[Span] | None:
    """Spans of the sources that make up the target; None if every source is used whole. Zeros follow the sources."""
    cut = fill.cut
    if fill.rows:
        return taken(fill.rows, cut.ranges if cut else [(0, sum(span.length for span in fill.rows))])
    if fill.packing is not None:
        assert fill.heads is not None, fill
        width = fill.heads.width
        if fill.packing == BY_EXPERT:
            starts = range(0, fill.heads.query * width, width)
            both = [Span(source, start, start + width) for start in starts for source in range(len(fill.sources))]
            return taken(both, cut.ranges if cut else [(0, 2 * fill.heads.query * width)])
        whole = [Span(0, start, start + width) for start in block_starts(fill.packing, fill.heads)]
    elif fill.absent:
        assert fill.heads is not None, fill
        there = iter(range(len(fill.sources)))
        numbers = [len(fill.sources) if part in fill.absent else next(there) for part in range(fill.merged)]
        whole = [Span(number, 0, size) for number, size in zip(numbers, fill.heads.of_parts, strict=True)]
    elif cut is None:
        return None
    else:
        whole = [Span(source, 0, size) for source, size in enumerate(cut.sizes)]
    return taken(whole, cut.ranges if cut else [(0, sum(span.length for span in whole))])


def apart(fill: Fill, matrix: str, groups: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[Fill]:
    """Split the fill of a merged matrix, or of its bias, into one for each of the `groups` of its sources.

    `matrix` is the matrix's path, `sizes` are the lengths of the sources along their outputs. Each source is in one
    group; a rank's `cut` is split as well.
    """
    assert fill.packing is None and not fill.absent and fill.merge == CAT, fill
    assert fill.cut is None or fill.cut.axis == 0, fill
    whole = fill.rows or [Span(source, 0, size) for source, size in enumerate(sizes)]
    held = taken(whole, fill.cut.ranges if fill.cut else [(0, sum(span.length for span in whole))])
    leaf = fill.target.rpartition(".")[2]
    fills = []
    for number, group in enumerate(groups):
        part = Part(matrix, number, _places(held, group))
        rows = tuple(Span(group.index(span.source), span.start, span.stop) for span in whole if span.source in group)
        cut = None
        if fill.cut is not None:
            of_group = (sum(span.length for span in rows),) if fill.rows else tuple(sizes[source] for source in group)
            cut = Cut(0, _kept(whole, fill.cut.ranges, group), of_group)
        sources = tuple(fill.sources[source] for source in group)
        target = named(part.path, leaf)
        own_rows = rows if fill.rows else ()
        fills.append(replace(fill, target=target, sources=sources, rows=own_rows, cut=cut, part=part))
    return fills


def rejoined(fills: Iterable[Fill]) -> list[Fill]:
    """Undo `apart` for each matrix, and its bias, whose parts are one run of whole sources each; keep other fills."""
    parts: dict[str, list[Fill]] = {}
    for fill in fills:
        parts.setdefault(_merged_target(fill), []).append(fill)
    made: list[Fill] = []
    for target, found in parts.items():
        if any(fill.part is None or len(fill.part.rows) > 1 or fill.rows or fill.cut is not None for fill in found):
            made += found
            continue
        in_order = sorted(found, key=lambda fill: fill.part.rows if fill.part else ())
        sources = tuple(source for fill in in_order for source in fill.sources)
        made.append(replace(in_order[0], target=target, sources=sources, part=None))
    return made


def _merged_target(fill: Fill) -> str:
    """The fill's target, or for a part that of the merged matrix or bias."""
    return fill.target if fill.part is None else named(fill.part.matrix, fill.target.rpartition(".")[2])


def _places(spans: Sequence[Span], group: Sequence[int]) -> tuple[Range, ...]:
    """Positions of the spans of these sources in the concatenation of all `spans`, merging neighbours."""
    places: list[Range] = []
    at = 0
    for span in spans:
        if span.source in group:
            first = places.pop()[0] if places and places[-1][1] == at else at
            places.append((first, at + span.length))
        at += span.length
    return tuple(places)


def _kept(whole: Sequence[Span], ranges: Sequence[Range], group: Sequence[int]) -> tuple[Range, ...]:
    """The part of `ranges`, positions in all spans of `whole`, that is in those of a group, as positions in these."""
    kept: list[Range] = []
    for start, stop in ranges:
        at = of_group = 0
        for span in whole:
            if span.source in group:
                first, last = max(start - at, 0), min(stop - at, span.length)
                if first < last:
                    begin = kept.pop()[0] if kept and kept[-1][1] == of_group + first else of_group + first
                    kept.append((begin, of_group + last))
                of_group += span.length
            at += span.length
    return tuple(kept)
