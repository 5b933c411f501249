"""How the pieces that ranks saved of one tensor make it up along one axis, told from their shapes.

A piece of a plain matrix is a range of its rows (column-parallel) or columns (row-parallel). A matrix that packs q, k
and v, or gate and up, was cut inside each of them, and keys that are fewer than ranks were replicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from infuse.architectures.packing import BLOCKS, PER_GROUP, PER_HEAD, Heads
from infuse.parallel.slices import Range, Tiling

Shape = tuple[int, ...]
_Parts = list[tuple[Range, ...]]  # of each rank


@dataclass(frozen=True)
class Packed:
    """What lies along the axis of a packed tensor: `groups` times neighbours of these `widths`."""

    widths: tuple[int, ...]
    groups: int = 1


def packed_qkv(packing: str | None, heads: Heads) -> Packed | None:
    """What lies along the rows of a packed q, k, v; None for packings of which no sharded form is known."""
    h, k, d = heads.query, heads.key, heads.width
    if packing in (None, BLOCKS):
        return Packed((h * d, k * d, k * d))
    if packing == PER_HEAD:
        return Packed((d, d, d), h)
    return Packed((h // k * d, d, d), k) if packing == PER_GROUP else None


def tiling(shapes: Sequence[Shape], wanted: Shape, packed: Packed | None = None) -> Tiling | None:
    """How pieces of `shapes`, one for each rank, make up a tensor of shape `wanted`; None where they do not."""
    if all(shape == wanted for shape in shapes):  # the only piece, or a replica on each rank
        length = wanted[0] if wanted else 1
        return Tiling(0, length, (((0, length),),) * len(shapes))
    axes = {axis for shape in shapes for axis, (a, b) in enumerate(zip(shape, wanted, strict=False)) if a != b}
    if len(axes) != 1 or any(len(shape) != len(wanted) for shape in shapes):
        return None
    axis = axes.pop()
    lengths, whole = [shape[axis] for shape in shapes], wanted[axis]
    if packed is None or sum(packed.widths) * packed.groups != whole or (packed.groups > 1 and sum(lengths) == whole):
        parts = _plain_parts(lengths, whole)  # also whole groups on each rank
    else:
        parts = _packed_parts(lengths, packed)
    return Tiling(axis, whole, tuple(parts)) if parts else None


def _plain_parts(lengths: Sequence[int], whole: int) -> _Parts:
    """One piece after the other; neighbours hold the same where all together are several times the whole."""
    copies = sum(lengths) // whole if sum(lengths) % whole == 0 and len(set(lengths)) == 1 else 1
    stops = list(accumulate(lengths[::copies]))
    if stops[-1] != whole:
        return []
    return [((stops[rank // copies] - length, stops[rank // copies]),) for rank, length in enumerate(lengths)]


def _packed_parts(lengths: Sequence[int], packed: Packed) -> _Parts:
    """Each group is cut by as many ranks."""
    each, left = divmod(len(lengths), packed.groups)
    if left or not each:
        return []
    found: _Parts = []
    for group in range(packed.groups):
        parts = _group_parts(lengths[group * each : (group + 1) * each], packed.widths, group * sum(packed.widths))
        if not parts:
            return []
        found += parts
    return found


def _group_parts(lengths: Sequence[int], widths: tuple[int, ...], start: int) -> _Parts:
    """Neighbouring blocks of `widths` from `start` on, of which each rank has a range of each."""
    ranks, blocks = len(lengths), len(widths)
    starts = [start + before for before in accumulate((0, *widths[:-1]))]
    if len(set(widths)) == 1 and sum(lengths) == sum(widths) and all(length % blocks == 0 for length in lengths):
        stops = [stop // blocks for stop in accumulate(lengths)]  # by heads, uneven numbers of them too
        ends = zip([0, *stops[:-1]], stops, strict=True)
        return [tuple((at + first, at + last) for at in starts) for first, last in ends]
    for copies in (n for n in range(1, ranks + 1) if ranks % n == 0):  # keys and values lie `copies` times
        repeats = (1, *(copies,) * (blocks - 1))
        sizes = [width * n // ranks for width, n in zip(widths, repeats, strict=True)]
        exact = all(width * n % ranks == 0 for width, n in zip(widths, repeats, strict=True))
        if exact and all(length == sum(sizes) for length in lengths):
            return [
                tuple(
                    (at + rank // n * size, at + (rank // n + 1) * size)
                    for at, size, n in zip(starts, sizes, repeats, strict=True)
                )
                for rank in range(ranks)
            ]
    return []
