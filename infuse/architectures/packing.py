"""How query, key and value rows lie in one matrix, and how a target tensor is made from source tensors.

Everything is split to q, k, v first and merged again in one order, [q | k | v] by heads, so that grouped queries,
shards and quantization never see an interleaving. Rows are the first axis: weights [rows, in] and biases [rows] alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from infuse.parallel.slices import Cut, Span, taken

BLOCKS = "blocks"  # [q: H D | k: K D | v: K D]           GPT-2, Phi-3, MPT
PER_HEAD = "per head"  # [head: (q D | k D | v D)] x H        BLOOM, GPT-NeoX
PER_GROUP = "per group"  # [group: (q D x H/K | k D | v D)] x K   Falcon 40B, InternLM2
FOUR_PARTS = "four parts"  # [part: (q | v | k)] x 4              CodeGen, as its TPU training sharded it
PACKINGS = (BLOCKS, PER_HEAD, PER_GROUP, FOUR_PARTS)

CAT, STACK = "cat", "stack"


@dataclass(frozen=True)
class Heads:
    """The head counts that a packing needs: H query heads and K key/value heads of width D."""

    query: int
    key: int
    width: int

    @property
    def rows(self) -> int:
        return (self.query + 2 * self.key) * self.width


@dataclass(frozen=True)
class Fill:
    """One target tensor of a step: which source tensors it is made from, and how.

    `target` is a name under the new module, `sources` are names under the replaced one. One source with a `packing` is
    split to q, k, v; several sources are merged by `merge` along a new or the first axis; `cut` is the part that a rank
    has. `format` names a quantization format, None keeps the compute dtype.
    """

    target: str
    sources: tuple[str, ...]
    transposed: bool = False
    packing: str | None = None
    heads: Heads | None = None
    merge: str = CAT
    format: str | None = None
    cut: Cut | None = None


def block_starts(packing: str, heads: Heads) -> list[int]:
    """The first row, in the packed matrix, of each head's D rows: of all query heads, then of all keys, then of all
    values.
    """
    h, k, d = heads.query, heads.key, heads.width
    if packing == BLOCKS:
        blocks = list(range(h + 2 * k))
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
    """The spans of its sources that the target is put together from; None where it is all of each source."""
    cut = fill.cut
    if fill.packing is not None:
        assert fill.heads is not None, fill
        width = fill.heads.width
        whole = [Span(0, start, start + width) for start in block_starts(fill.packing, fill.heads)]
    elif cut is None:
        return None
    else:
        whole = [Span(source, 0, size) for source, size in enumerate(cut.sizes)]
    return taken(whole, cut.ranges if cut else [(0, sum(span.length for span in whole))])
