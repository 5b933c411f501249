"""Infer from their shapes how the pieces of a tensor that ranks saved fit together along one axis.

A piece of a plain matrix is a range of its rows (column-parallel) or columns (row-parallel). In a matrix that packs q,
k and v, or gate and up, each of them was cut separately. Keys were replicated if there were fewer key heads than ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from infuse.architectures.packing import BLOCKS, PER_GROUP, PER_HEAD, Heads
from infuse.parallel.slices import Range, Tiling
from infuse.weights.lazy import Shape

_Parts = list[tuple[Range, ...]]  # the ranges of each rank


@dataclass(frozen=True)
class Packed:
    """Layout along the axis of a packed tensor: `groups` repetitions of adjacent blocks of these `widths`."""

    widths: tuple[int, ...]
    groups: int = 1


def packed_qkv(packing: str | None, heads: Heads) -> Packed | None:
    """Row layout of a packed q, k, v; None for packings without a known sharded form."""
    h, k, d = heads.query, heads.key, heads.width
    if packing in (None, BLOCKS):
        return Packed((h * d, k * d, k * d))
    if packing == PER_HEAD:
        return Packed((d, d, d), h)
    return Packed((h // k * d, d, d), k) if packing == PER_GROUP else None


def tiling(shapes: Sequence[Shape], wanted: Shape, packed: Packed | None = None) -> Tiling | None:
    """Infer how pieces of `shapes`, one per rank, form a tensor of shape `wanted`; None if they do not."""
    if all(shape == wanted for shape in shapes):  # a single piece, or a replica on each rank
        length = wanted[0] if wanted else 1
        return Tiling(0, length, (((0, length),),) * len(shapes))
    axes = {axis for shape in shapes for axis, (a, b) in enumerate(zip(shape, wanted, strict=False)) if a != b}
    if len(axes) != 1 or any(len(shape) != len(wanted) for shape in shapes):
        return None
    axis = axes.pop()
    lengths, whole = [shape[axis] for shape in shapes], wanted[axis]
    if packed is None or sum(packed.widths) * packed.groups != whole or (packed.groups > 1 and sum(lengths) == whole):
        parts = _plain_parts(lengths, whole)  # this includes whole groups on each rank
    else:
        parts = _packed_parts(lengths, packed)
    return Tiling(axis, whole, tuple(parts)) if parts else None


def _plain_parts(lengths: Sequence[int], whole: int) -> _Parts:
    """Place the pieces one after another; neighbours are replicas if the pieces add up to a multiple of the whole."""
    if not whole or not sum(lengths):
        return []
    copies = sum(lengths) // whole if sum(lengths) % whole == 0 and len(set(lengths)) == 1 else 1
    stops = list(accumulate(lengths[::copies]))
    if stops[-1] != whole:
        return []
    return [((stops[rank // copies] - length, stops[rank // copies]),) for rank, length in enumerate(lengths)]


def _packed_parts(lengths: Sequence[int], packed: Packed) -> _Parts:
    """Cut each group over an equal number of ranks."""
    each, left = divmod(len(lengths), packed.groups)
    if left or not each:
        return []
    ranges: _Parts = []
    for group in range(packed.groups):
        parts = _group_parts(lengths[group * each : (group + 1) * each], packed.widths, group * sum(packed.widths))
        if not parts:
            return []
        ranges += parts
    return ranges


def _group_parts(lengths: Sequence[int], widths: tuple[int, ...], start: int) -> _Parts:
    """Cut adjacent blocks of `widths`, starting at `start`, so that each rank gets a range of every block."""
    ranks, blocks = len(lengths), len(widths)
    starts = [start + before for before in accumulate((0, *widths[:-1]))]
    if len(set(widths)) == 1 and sum(lengths) == sum(widths) and all(length % blocks == 0 for length in lengths):
        stops = [stop // blocks for stop in accumulate(lengths)]  # by heads, possibly an uneven number per rank
        ends = zip([0, *stops[:-1]], stops, strict=True)
        return [tuple((at + first, at + last) for at in starts) for first, last in ends]
    for copies in (n for n in range(1, ranks + 1) if ranks % n == 0):  # keys and values are stored `copies` times
        repeats = (1, *(copies,) * (blocks - 1))
        sizes = [width * n // ranks for width, n in zip(widths, repeats, strict=True)]
        exact = all(width * n % ranks == 0 for width, n in zip(widths, repeats, strict=True))
        if exact and all(length == sum(sizes) for length in lengths):
            blocks_cut = list(zip(starts, sizes, repeats, strict=True))
            return [
                tuple((at + rank // n * size, at + (rank // n + 1) * size) for at, size, n in blocks_cut)
                for rank in range(ranks)
            ]
    return []
