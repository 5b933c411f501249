"""Compute each rank's part of a layer without a spec, for each interpretation of its linears. Pure: numbers only."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from infuse.architectures.foreign.plain import linears
from infuse.architectures.foreign.split import Count, SplitShape, TablePart
from infuse.architectures.packing import BLOCKS, FOUR_PARTS, Fill, block_starts
from infuse.architectures.part import COLUMN, ROW, Matrix
from infuse.architectures.ranks import RankShare
from infuse.ground.errors import SpecMismatch
from infuse.parallel.mesh import ONE, Mesh
from infuse.parallel.slices import Cut, Range, Span, split, split_heads, taken, total
from infuse.unknown.interpretations import Interpretation, LayerChain, owner_of
from infuse.unknown.roles import Roles

MOST_INTERPRETATIONS = 24  # each one has to be proven


def split_parts(
    module: nn.Module, roles: Roles, config: Any, mesh: Mesh, *, grain: int, multiple: Callable[[str, int], int]
) -> list[tuple[RankShare, list[RankShare]]]:
    """Return, for each distinct interpretation of the layer, the whole and the part of each rank.

    A row linear's inputs are split in multiples of `multiple(path, inputs)`. Raises SpecMismatch if no interpretation
    fits or there is too little to split.
    """
    name = f"{type(module).__name__} over {mesh.tp} ranks"
    shapes = {path: shape for path, shape in linears(module) if path}
    chains = [LayerChain(chain.columns, chain.rows, module, shapes, config) for chain in roles.chains]
    choices = [chain.interpretations() for chain in chains]
    if wrong := [chain.misfit() for chain, fitting in zip(chains, choices, strict=True) if not fitting]:
        raise SpecMismatch(name, wrong)
    names: dict[tuple[RankShare, tuple[RankShare, ...]], tuple[str, ...]] = {}
    for chosen in _products(choices):
        with suppress(SpecMismatch) if names else nullcontext():  # raise only if the most likely one fails
            cutters = [
                _Cutter(chain, interpretation, name, grain, multiple)
                for chain, interpretation in zip(chains, chosen, strict=True)
            ]
            parts = _layer_part(cutters, ONE), tuple(_layer_part(cutters, rank) for rank in mesh.ranks())
            names[parts] = (*names.get(parts, ()), "; ".join(map(str, chosen)))
    shares = []
    for (whole, ranks), interpretations in itertools.islice(names.items(), MOST_INTERPRETATIONS):
        assert isinstance(whole.shape, SplitShape)
        shares.append((replace(whole, shape=replace(whole.shape, interpretations=interpretations)), list(ranks)))
    return shares


def _products(choices: list[list[Interpretation]]) -> Iterator[tuple[Interpretation, ...]]:
    """Yield combinations of interpretations, one per chain, most likely first.

    Combinations that differ from the first in one kind of chain come before those that differ in two. Similar chains
    (self- and cross-attention, the blocks of a stage) get the same interpretation.
    """
    kinds = [
        (len(interpretations), None if interpretations[0].by_features else interpretations[0].heads)
        for interpretations in choices
    ]
    distinct = list(dict.fromkeys(kinds))
    combinations = itertools.product(*(range(kind[0]) for kind in distinct))
    for combination in sorted(combinations, key=lambda numbers: (sum(map(bool, numbers)), sum(numbers))):
        numbers = dict(zip(distinct, combination, strict=True))
        yield tuple(interpretations[numbers[kind]] for interpretations, kind in zip(choices, kinds, strict=True))


def _layer_part(cutters: Iterable[_Cutter], mesh: Mesh) -> RankShare:
    parts = [cutter.part(mesh) for cutter in cutters]
    shapes = [shape for shape, _ in parts]
    by_heads = [shape for shape in shapes if shape.head_counts]
    alike = len({(shape.heads, shape.head_counts) for shape in by_heads}) == 1
    shape = SplitShape(
        matrices=tuple(matrix for shape in shapes for matrix in shape.matrices),
        tables=tuple(table for shape in shapes for table in shape.tables),
        counts=tuple(count for shape in shapes for count in shape.counts),
    )
    if alike:
        attentions = tuple(path for shape in by_heads for path in shape.attentions)
        shape = replace(shape, heads=by_heads[0].heads, head_counts=by_heads[0].head_counts, attentions=attentions)
    return RankShare(shape, tuple(fill for _, fills in parts for fill in fills))


@dataclass(frozen=True)
class _Share:
    """A rank's query and key/value heads, or inner features, which count as both.

    `counts` are the heads of each rank if every rank has a contiguous range of them.
    """

    query: tuple[Range, ...]
    key: tuple[Range, ...]
    counts: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Cutter:
    """Cut one chain by one interpretation; `name` is for error messages."""

    chain: LayerChain
    interpretation: Interpretation
    name: str
    grain: int
    multiple: Callable[[str, int], int]

    def share(self, mesh: Mesh) -> _Share:
        heads, rank = self.interpretation.heads, mesh.tp_rank
        parts = 4 if self.interpretation.packing == FOUR_PARTS else 1
        if heads.query // parts < mesh.tp:
            what = "inner features" if self.interpretation.by_features else "heads"
            raise SpecMismatch(self.name, [f"{heads.query} {what}{' in four parts' * (parts > 1)} are too few"])
        if self.interpretation.by_features:
            multiple = max(self.multiple(path, heads.query) for path in self.chain.rows)
            features = split(heads.query, mesh.tp, grain=self.grain, multiple=multiple)[rank]
            return _Share((features,), (features,))
        if self.interpretation.packing == FOUR_PARTS:
            start, stop = split(heads.query // 4, mesh.tp)[rank]
            each = tuple((first + start, first + stop) for first in range(0, heads.query, heads.query // 4))
            return _Share(each, each)
        shares = split_heads(heads.query, heads.key, mesh.tp)
        assert shares is not None
        counts = tuple(total([share.heads]) for share in shares)
        return _Share((shares[rank].heads,), (shares[rank].kv_heads,), counts)

    def part(self, mesh: Mesh) -> tuple[SplitShape, tuple[Fill, ...]]:
        """Return a rank's part of the chain."""
        share, heads = self.share(mesh), self.interpretation.heads.query
        lengths = total(share.query), total(share.key)
        matrices, fills, tables = [], [], []
        for path in (*self.chain.columns, *self.chain.rows):
            linear, row = self.chain.shapes[path], path in self.chain.rows
            size = linear.inputs if row else linear.outputs
            ranges = self.ranges(share, size)
            cut = None if mesh.tp == 1 else Cut(1 if row else 0, ranges, (size,))
            bias = linear.bias and not (row and mesh.tp_rank)
            sizes = (linear.outputs, total(ranges)) if row else (total(ranges), linear.inputs)
            matrices.append(Matrix(path, *sizes, bias, ROW if row else COLUMN))
            fills.append(Fill(f"{path}.weight", (f"{path}.weight",), linear.transposed, cut=cut))
            if bias:
                fills.append(Fill(f"{path}.bias", (f"{path}.bias",), cut=None if row else cut))
        for table, axis in self.tables() if share.counts else ():
            tables.append(replace(table, shape=(*table.shape[:axis], lengths[0], *table.shape[axis + 1 :])))
            fills.append(Fill(table.path, (table.path,), cut=Cut(axis, share.query, (heads,))))
        counts = [
            Count(module, name, count)
            for module, name, value in self.chain.counts(self.interpretation.config)
            if (count := self.interpretation.own_count(name, value, *lengths)) is not None
        ]
        shape = SplitShape(tuple(matrices), tuple(tables), tuple(counts))
        if share.counts:
            attentions = (owner_of(self.chain.columns),)
            shape = replace(shape, heads=share.query[0], head_counts=share.counts, attentions=attentions)
        return shape, tuple(fills)

    def ranges(self, share: _Share, size: int) -> tuple[Range, ...]:
        """Return a rank's ranges of an axis of length `size`: a column linear's outputs or a row linear's inputs."""
        heads, packing = self.interpretation.heads, self.interpretation.packing
        h, k, d = heads.query, heads.key, heads.width
        if size == heads.rows and not self.interpretation.by_features:
            starts = block_starts(packing, heads)
            block_ranges = (*share.query, *_scaled(share.key, 1, h), *_scaled(share.key, 1, h + k))
            blocks = [block for start, stop in block_ranges for block in range(start, stop)]
            rows = [Span(0, row, row + d) for row in sorted(starts[block] for block in blocks)]
            return tuple((span.start, span.stop) for span in taken(rows, [(0, len(rows) * d)]))
        if size == h * d:
            return _scaled(share.query, d)
        if size == k * d:
            return _scaled(share.key, d)
        if size == 2 * k * d and packing == BLOCKS:
            return (*_scaled(share.key, d), *_scaled(share.key, d, k * d))
        if size == 2 * k * d:
            return _scaled(share.key, 2 * d)
        return _scaled(share.query, size // h)

    def tables(self) -> Iterator[tuple[TablePart, int]]:
        """Yield parameters and buffers with an entry per head, and their head axis (second of a matrix, else first)."""
        heads = self.interpretation.heads.query
        for path, module in self.chain.modules() if heads > 1 else ():
            for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None or not tensor.dim() or ("Norm" in type(module).__name__ and tensor.dim() < 2):
                    continue  # a norm's features may happen to be as many as the heads
                axis = 1 if tensor.dim() == 2 and tensor.shape[1] == heads else 0
                if tensor.shape[axis] == heads:
                    where = f"{path}.{leaf}" if path else leaf
                    yield TablePart(where, tuple(tensor.shape), leaf in module._buffers), axis


def _scaled(ranges: Iterable[Range], length: int, first: int = 0) -> tuple[Range, ...]:
    """Scale ranges of units to `length` positions per unit, starting at `first`."""
    return tuple((first + start * length, first + stop * length) for start, stop in ranges)
