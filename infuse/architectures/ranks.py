"""One rank's part of a replacement: its shape, with the rank's heads and widths, and its fills. No tensors.

Each part's parameters name the units that ranks split; parameters without units stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from infuse.architectures.foreign.plain import EmbeddingShape, LinearShape
from infuse.architectures.foreign.split import SplitShape
from infuse.architectures.layer import LayerShape
from infuse.architectures.module import ModuleShape
from infuse.architectures.packing import Fill
from infuse.architectures.part import EXPERT, HEADS, INNER, KV_HEADS, ROW, VOCAB, Parameter, PartShape, Share, named
from infuse.architectures.parts.experts import ExpertsShape
from infuse.architectures.program import reduces
from infuse.ground.errors import SpecMismatch
from infuse.parallel.mesh import Mesh
from infuse.parallel.slices import Range, split, split_heads

Shape = LayerShape | LinearShape | EmbeddingShape | ExpertsShape | SplitShape | ModuleShape
Plain = TypeVar("Plain", LinearShape, EmbeddingShape)


@dataclass(frozen=True)
class RankShare:
    """One rank's shape and fills."""

    shape: Shape
    fills: tuple[Fill, ...]


def layer_part(
    shape: LayerShape | ModuleShape, fills: tuple[Fill, ...], mesh: Mesh, *, grain: int, multiples: Mapping[str, int]
) -> RankShare:
    """Part of a layer or of a whole module for one rank of `mesh`. SpecMismatch lists all that ranks cannot share.

    Inner widths are split in multiples of `grain` and in whole groups of the formats of the matrices that read them:
    `multiples` has the group lengths, keyed by weight.
    """
    parts: dict[str, PartShape] = {}
    cuts: dict[str, tuple[Parameter, Share]] = {}
    differences: list[str] = []
    if isinstance(shape, LayerShape) and reduces(shape.program) and shape.expert_count and mesh.size != mesh.tp:
        differences.append("attention and experts are added up at once, which other ranks do; give tp_size alone")
    for field, part in shape.parts.items():
        name = shape.child(field)
        if (mesh.size if part.expert_count else mesh.tp) == 1:
            continue
        try:
            share = share_of(part, mesh, grain=grain, multiples=_inside(name, multiples))
            parts[field] = part.of_rank(share)
        except SpecMismatch as mismatch:
            differences += mismatch.differences
        else:
            cuts |= {named(name, parameter.target): (parameter, share) for parameter in part.parameters}
    if differences:
        raise SpecMismatch(f"its parts on {mesh.size} ranks", differences)
    return RankShare(shape.with_parts(parts), _cut_fills(fills, cuts))


def plain_part(shape: Plain, mesh: Mesh, grain: int) -> RankShare:
    """A rank's outputs of a linear, or its rows of an embedding. A head and its tied embedding get the same rows."""
    if mesh.tp == 1:
        return RankShare(shape, shape.fills)
    share = share_of(shape, mesh, grain=grain, multiples={})
    cuts = {parameter.target: (parameter, share) for parameter in shape.parameters}
    return RankShare(shape.of_rank(share), _cut_fills(shape.fills, cuts))


def experts_part(
    shape: ExpertsShape, fills: tuple[Fill, ...], mesh: Mesh, *, grain: int, multiples: Mapping[str, int]
) -> RankShare:
    """A rank's experts, or its slice of each. SpecMismatch if there are too few of either."""
    if mesh.size == 1:
        return RankShare(shape, fills)
    share = share_of(shape, mesh, grain=grain, multiples=multiples)
    cuts = {parameter.target: (parameter, share) for parameter in shape.parameters}
    return RankShare(shape.of_rank(share), _cut_fills(fills, cuts))


def share_of(part: PartShape, mesh: Mesh, *, grain: int, multiples: Mapping[str, int]) -> Share:
    """Give each rank a range of every unit that the part's parameters are split in.

    SpecMismatch if there are fewer units than ranks. Exceptions: ranks may replicate key/value heads, and a small
    vocabulary may leave some ranks without rows.
    """
    if part.expert_count:
        return _share_of_experts(part, mesh, grain, multiples)
    counts = _counts(part)
    _refuse_scarce(part, {unit: (count, mesh.tp) for unit, count in counts.items()})
    ranges: dict[str, tuple[Range, ...]] = {}
    if HEADS in counts:
        heads = counts.pop(HEADS)
        shares = split_heads(heads, counts.pop(KV_HEADS, heads), mesh.tp)
        assert shares is not None
        ranges[HEADS] = tuple(part_of_rank.heads for part_of_rank in shares)
        ranges[KV_HEADS] = tuple(part_of_rank.kv_heads for part_of_rank in shares)
    for unit, count in counts.items():
        ranges[unit] = split(count, mesh.tp, grain=grain, multiple=_groups(part, unit, multiples))
    return Share(mesh.tp_rank, ranges)


def _share_of_experts(part: PartShape, mesh: Mesh, grain: int, multiples: Mapping[str, int]) -> Share:
    """Like `share_of`, among all ranks: they split the experts and the width of each; other units are split over all
    ranks.
    """
    ways = {EXPERT: mesh.ep, INNER: mesh.slices}
    counts = {unit: (count, ways.get(unit, mesh.size)) for unit, count in _counts(part).items()}
    _refuse_scarce(part, counts)
    ranges: dict[str, tuple[Range, ...]] = {}
    for unit, (count, size) in counts.items():
        step = 1 if unit == EXPERT else grain
        parts = split(count, size, grain=step, multiple=_groups(part, unit, multiples))
        places = {EXPERT: [rank.ep_rank for rank in mesh.ranks()], INNER: [rank.slice_rank for rank in mesh.ranks()]}
        ranges[unit] = tuple(parts[place] for place in places.get(unit, range(size)))
    return Share(mesh.rank, ranges)


def _counts(part: PartShape) -> dict[str, int]:
    """The number of units of each kind that the part's parameters, or what it takes from others, are split in."""
    extents = [extent for parameter in part.parameters for extent in (*parameter.extents, parameter.experts)]
    extents += part.taken_extents
    return {extent.unit: extent.count for extent in extents if extent is not None}


def _groups(part: PartShape, unit: str, multiples: Mapping[str, int]) -> int:
    """The multiple of units that each rank gets, so that it has whole groups of the matrices that read them."""
    readers = [matrix for matrix in part.matrices if matrix.split == ROW and matrix.extents[0].unit == unit]
    return math.lcm(*(multiples.get(matrix.weight, 1) for matrix in readers))


def _refuse_scarce(part: PartShape, counts: Mapping[str, tuple[int, int]]) -> None:
    """SpecMismatch if there are fewer units than ranks, by unit."""
    differences = [
        f"{count} {unit} are too few for {size} ranks"
        for unit, (count, size) in counts.items()
        if count < size and unit not in (KV_HEADS, VOCAB)
    ]
    if differences:
        raise SpecMismatch(type(part).__name__, differences)


def _inside(name: str, multiples: Mapping[str, int]) -> dict[str, int]:
    """The entries of `multiples` for the part `name`, keyed by the part's own names."""
    start = f"{name}."
    return {weight.removeprefix(start): n for weight, n in multiples.items() if weight.startswith(start)}


def _cut_fills(fills: Iterable[Fill], cuts: Mapping[str, tuple[Parameter, Share]]) -> tuple[Fill, ...]:
    """Cut the fills for a rank; drop those that only the first rank adds. `cuts` are keyed by target."""
    kept = []
    for fill in fills:
        if fill.target not in cuts:
            kept.append(fill)
            continue
        parameter, share = cuts[fill.target]
        if parameter.added_once and not share.adds(parameter):
            continue
        sources = 1 if fill.stacked or fill.rows else fill.merged
        cut = parameter.cut(share.own, sources) if parameter.extents else None
        kept.append(replace(fill, cut=cut))
    return tuple(kept)
