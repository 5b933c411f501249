"""One rank's part of a layer without a spec, for each way in which it may be meant. Pure: numbers only."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from infuse.architectures.packing import BLOCKS, FOUR_PARTS, Fill, Heads, block_starts
from infuse.architectures.plain import linears
from infuse.architectures.ranks import Part
from infuse.architectures.split import COLUMN, ROW, Count, LinearPart, SplitShape, TablePart
from infuse.errors import SpecMismatch
from infuse.parallel.mesh import ONE, Mesh
from infuse.parallel.slices import Cut, Range, split, split_heads
from infuse.unknown.interpretations import (
    KV_WORDS,
    WIDTH_WORDS,
    Layer,
    Reading,
    around,
    attributes,
    counts_heads,
    has_word,
    misfit,
    owner_of,
    readings,
)
from infuse.unknown.roles import Chain, Roles

MOST_READINGS = 24  # each costs a proof


def split_parts(
    module: nn.Module, roles: Roles, config: Any, mesh: Mesh, *, grain: int, multiple: Callable[[Fill, SplitShape], int]
) -> list[tuple[Part, list[Part]]]:
    """For each reading of the layer: the whole, and the part of each rank. SpecMismatch: there is none, or too little
    to share.

    `multiple(fill, whole)` is what an inner width must be split in multiples of.
    """
    layer = Layer(module, {path: shape for path, shape in linears(module) if path}, config, type(module).__name__)
    choices = [list(readings(layer, chain)) for chain in roles.chains]
    if wrong := [misfit(layer, chain) for chain, found in zip(roles.chains, choices, strict=True) if not found]:
        raise SpecMismatch(f"{layer.name} over {mesh.tp} ranks", wrong)
    found: dict[tuple[Part, tuple[Part, ...]], list[str]] = {}
    for chosen in _products(choices):
        cutter = _Cutter(layer, tuple(zip(roles.chains, chosen, strict=True)), grain, multiple)
        with (
            contextlib.suppress(SpecMismatch) if found else contextlib.nullcontext()
        ):  # the first reading says why it cannot be
            parts = cutter.part(ONE), tuple(cutter.part(rank) for rank in mesh.ranks())
            found.setdefault(parts, []).append(hashlib.sha256(repr(chosen).encode()).hexdigest()[:16])
    first = itertools.islice(found.items(), MOST_READINGS)
    return [(_named(whole, names), list(parts)) for (whole, parts), names in first]


def _named(whole: Part, names: list[str]) -> Part:
    assert isinstance(whole.shape, SplitShape)
    return replace(whole, shape=replace(whole.shape, readings=tuple(names)))


def _products(choices: list[list[Reading]]) -> Iterator[tuple[Reading, ...]]:
    """Combinations of readings, likely ones first: those that differ from the first in one kind of chain, then in two.

    Groups that are alike (self- and cross-attention, the blocks of a stage) are read alike.
    """
    kinds = [(len(found), found[0].heads) for found in choices]
    distinct = list(dict.fromkeys(kinds))
    combinations = itertools.product(*(range(number) for number, _ in distinct))
    for combination in sorted(combinations, key=lambda numbers: (sum(map(bool, numbers)), sum(numbers))):
        numbers = dict(zip(distinct, combination, strict=True))
        yield tuple(found[numbers[kind]] for found, kind in zip(choices, kinds, strict=True))


@dataclass(frozen=True)
class _Cutter:
    layer: Layer
    chains: tuple[tuple[Chain, Reading], ...]
    grain: int
    multiple: Callable[[Fill, SplitShape], int]

    def part(self, mesh: Mesh) -> Part:
        parts, fills, tables, shares = [], [], [], []
        counts: list[Count] = []
        for chain, reading in self.chains:
            share = self.share(chain, reading, mesh)
            shares.append(share)
            counts += self.counts(chain, reading, share)
            for path in (*chain.columns, *chain.rows):
                linear = self.layer.shapes[path]
                row = path in chain.rows
                ranges = share.inputs if row else share.outputs(linear.outputs)
                size = linear.inputs if row else linear.outputs
                cut = None if mesh.tp == 1 else Cut(1 if row else 0, ranges, (size,))
                length = sum(stop - start for start, stop in ranges)
                bias = linear.bias and not (row and mesh.tp_rank)
                own = (length, linear.outputs) if row else (linear.inputs, length)
                parts.append(LinearPart(path, ROW if row else COLUMN, *own, bias))
                fills.append(Fill(f"{path}.weight", (f"{path}.weight",), linear.transposed, cut=cut, matrix=True))
                if bias:
                    fills.append(Fill(f"{path}.bias", (f"{path}.bias",), cut=None if row else cut))
            if reading.heads is not None and share.own is not None:
                for table, axis in self.tables(chain, reading.heads):
                    mine = share.own[1] - share.own[0]
                    tables.append(
                        replace(table, shape=tuple(mine if i == axis else n for i, n in enumerate(table.shape)))
                    )
                    fills.append(Fill(table.path, (table.path,), cut=Cut(axis, (share.own,), (reading.heads.query,))))
        of_heads = {
            (share.own, reading.heads.query)
            for share, (_, reading) in zip(shares, self.chains, strict=True)
            if reading.heads
        }
        heads, all_heads = next(iter(of_heads)) if len(of_heads) == 1 else (None, 0)
        shape = SplitShape(tuple(parts), tuple(tables), tuple(counts))
        if heads is not None:
            attentions = tuple(owner_of(chain.columns) for chain, reading in self.chains if reading.heads)
            owned = next(share.counts for share in shares if share.own == heads and share.counts)
            shape = replace(shape, heads=heads, all_heads=all_heads, attentions=attentions, head_counts=owned)
        return Part(shape, tuple(fills))

    def share(self, chain: Chain, reading: Reading, mesh: Mesh) -> _Share:
        width = self.layer.shapes[chain.rows[0]].inputs
        if reading.heads is None:
            if width < mesh.tp:
                raise SpecMismatch(f"{self.layer.name} over {mesh.tp} ranks", [f"{width} inner features are too few"])
            parts = split(width, mesh.tp, grain=self.grain, multiple=self.inner_multiple(chain, width))
            return _Share(reading, width, parts[mesh.tp_rank])
        heads = reading.heads
        if reading.packing == FOUR_PARTS:
            each = split(heads.query // 4, mesh.tp)[mesh.tp_rank]
            if heads.query // 4 < mesh.tp:
                raise SpecMismatch(
                    f"{self.layer.name} over {mesh.tp} ranks", [f"{heads.query} heads in four parts are too few"]
                )
            own = tuple(part * (heads.query // 4) + head for part in range(4) for head in range(*each))
            return _Share(reading, width, None, own, own)
        found = split_heads(heads.query, heads.key, mesh.tp)
        if found is None:
            raise SpecMismatch(f"{self.layer.name} over {mesh.tp} ranks", [f"{heads.query} heads are too few"])
        mine = found[mesh.tp_rank]
        counts = tuple(share.heads[1] - share.heads[0] for share in found)
        return _Share(reading, width, mine.heads, tuple(range(*mine.heads)), tuple(range(*mine.kv_heads)), counts)

    def inner_multiple(self, chain: Chain, width: int) -> int:
        """What an inner width is split in multiples of, for the formats of the rows that read it."""
        fills = [(path, Fill(f"{path}.weight", (f"{path}.weight",), matrix=True)) for path in chain.rows]
        whole = SplitShape(
            tuple(LinearPart(path, ROW, width, self.layer.shapes[path].outputs, False) for path in chain.rows)
        )
        return max(self.multiple(fill, whole) for _, fill in fills)

    def tables(self, chain: Chain, heads: Heads) -> Iterator[tuple[TablePart, int]]:
        """The parameters and buffers of a chain that have a place for each head, and along which axis: the last of two,
        else the first.
        """
        top = around(self.layer, chain)
        for name, module in self.layer.module.get_submodule(top).named_modules():
            path = ".".join(part for part in (top, name) if part)
            if path in self.layer.shapes or heads.query == 1:
                continue
            for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
                if "Norm" in type(module).__name__ and (tensor is None or tensor.dim() < 2):
                    continue  # over features, of which there may be as many as heads
                axis = 1 if tensor is not None and tensor.dim() == 2 and tensor.shape[1] == heads.query else 0
                if tensor is not None and tensor.dim() and tensor.shape[axis] == heads.query:
                    yield (
                        TablePart(f"{path}.{leaf}" if path else leaf, tuple(tensor.shape), leaf in module._buffers),
                        axis,
                    )

    def counts(self, chain: Chain, reading: Reading, share: _Share) -> Iterator[Count]:
        """The attributes of a chain's modules that count what a rank has only a part of."""
        for module, name, value in attributes(self.layer, chain, reading.config):
            own = share.count(name, value)
            if own is not None:
                yield Count(module, name, own)


@dataclass(frozen=True)
class _Share:
    """A rank's share of a chain: its range `own` of heads or of the width, its query and key/value heads one by one;
    all ranks' counts.
    """

    reading: Reading
    width: int
    own: Range | None
    query: tuple[int, ...] = ()
    key: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()

    @property
    def inputs(self) -> tuple[Range, ...]:
        """The inputs of the chain's row linears."""
        heads = self.reading.heads
        if heads is None:
            assert self.own is not None
            return (self.own,)
        return _ranges([head * heads.width for head in self.query], heads.width)

    def outputs(self, rows: int) -> tuple[Range, ...]:
        """The outputs of a column linear that makes so many rows."""
        heads = self.reading.heads
        if heads is None:
            assert self.own is not None
            start, stop = self.own
            if rows == self.width:
                return (self.own,)
            return (
                (self.own, (self.width + start, self.width + stop)) if self.reading.halves else ((2 * start, 2 * stop),)
            )
        h, k, d = heads.query, heads.key, heads.width
        if rows == heads.rows:
            starts = block_starts(self.reading.packing, heads)
            own = [*self.query, *(h + head for head in self.key), *(h + k + head for head in self.key)]
            return _ranges(sorted(starts[block] for block in own), d)
        if rows == h * d:
            return self.inputs
        if rows == k * d:
            return _ranges([head * d for head in self.key], d)
        if rows == 2 * k * d and self.reading.packing == BLOCKS:
            return _ranges([block * k * d + head * d for block in range(2) for head in self.key], d)
        if rows == 2 * k * d:
            return _ranges([2 * head * d for head in self.key], 2 * d)
        return _ranges([head * (rows // h) for head in self.query], rows // h)

    def count(self, name: str, value: int) -> int | None:
        """What an attribute of that name and value is on this rank, None where it stays."""
        heads = self.reading.heads
        if heads is None:
            assert self.own is not None
            return (
                self.own[1] - self.own[0]
                if value == self.width and self.reading.widths and has_word(name, WIDTH_WORDS)
                else None
            )
        query, key = len(self.query), len(self.key)
        if counts_heads(name):
            if value == heads.key and has_word(name, KV_WORDS) and "group" not in name:
                return key
            if value == heads.query and not has_word(name, KV_WORDS):
                return query
        if ("group" in name or "rep" in name) and value == heads.query // heads.key:
            return query // key
        if (
            self.reading.widths
            and has_word(name, WIDTH_WORDS)
            and value in (heads.query * heads.width, heads.key * heads.width)
        ):
            return (query if value == heads.query * heads.width else key) * heads.width
        return None


def _ranges(starts: Iterable[int], length: int) -> tuple[Range, ...]:
    """Ranges of `length` from each start, neighbours joined."""
    joined: list[Range] = []
    for start in starts:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], start + length)
        else:
            joined.append((start, start + length))
    return tuple(joined)
