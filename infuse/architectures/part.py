"""Descriptors of a part's matrices and other parameters, and of how ranks split them.

Plans, formats, ranks, shards and layers iterate over these; only the part itself knows which matrices it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from infuse.parallel.slices import Cut, Range

if TYPE_CHECKING:
    from typing_extensions import Self

COLUMN, ROW, WHOLE = "column", "row", "whole"  # ranks split the outputs of a matrix, its inputs, or neither
HEADS, KV_HEADS, INNER, VOCAB = "heads", "key/value heads", "inner features", "rows of the vocabulary"
EXPERT = "experts"


@dataclass(frozen=True)
class Extent:
    """`count` units of `width` positions each along the axis that ranks split. A rank gets whole units."""

    unit: str
    count: int
    width: int = 1

    @property
    def length(self) -> int:
        return self.count * self.width


@dataclass(frozen=True)
class Parameter:
    """One parameter of a part, by its name under the new module.

    `extents` are its sections along `axis` (0 outputs, 1 inputs), in order: q | k | v, gate | up.
    Without extents, every rank holds the whole parameter or, if `added_once`, only the first rank,
    since it is added to a sum over ranks.
    """

    target: str
    extents: tuple[Extent, ...] = ()
    axis: int = 0
    added_once: bool = False

    def cut(self, own: Mapping[str, Range], sources: int) -> Cut:
        """A rank's cut, from its range `own` of each unit. The parameter is made from `sources` tensors."""
        ranges, at = [], 0
        for extent in self.extents:
            start, stop = own[extent.unit]
            ranges.append((at + start * extent.width, at + stop * extent.width))
            at += extent.length
        sizes: tuple[int, ...] = (at,)
        if sources == len(self.extents):
            sizes = tuple(extent.length for extent in self.extents)
        elif sources > 1:  # each source is one unit: one norm per head
            sizes = (at // sources,) * sources
        return Cut(self.axis, tuple(ranges), sizes)


@dataclass(frozen=True)
class Matrix:
    """A weight [outputs, inputs] that a part multiplies with, and its bias; it may have a quantization format.

    `target` is the path of its linear in the new module. `extents` are its sections along the axis that ranks split.
    `op` is "embedding" if rows are looked up instead of multiplied.
    """

    target: str
    outputs: int
    inputs: int
    bias: bool
    split: str = WHOLE
    extents: tuple[Extent, ...] = ()
    op: str = "linear"

    @property
    def weight(self) -> str:
        """Name of the weight under the new module."""
        return named(self.target, "weight")

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs, self.inputs

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        weight = Parameter(self.weight, self.extents, axis=1 if self.split == ROW else 0)
        if not self.bias:
            return (weight,)
        name = named(self.target, "bias")
        if self.split == ROW:
            return weight, Parameter(name, added_once=True)
        return weight, Parameter(name, self.extents)


@dataclass(frozen=True)
class Share:
    """How ranks divide one part: the range of each rank for each unit, and this rank's number."""

    rank: int
    ranges: Mapping[str, tuple[Range, ...]]

    @property
    def own(self) -> dict[str, Range]:
        return {unit: ranges[self.rank] for unit, ranges in self.ranges.items()}

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def counts(self, unit: str) -> tuple[int, ...]:
        """Number of units of each rank."""
        return tuple(stop - start for start, stop in self.ranges[unit])

    def count(self, unit: str) -> int:
        """Number of units of this rank."""
        return self.counts(unit)[self.rank]


class PartShape:
    """Dimensions and contents of one part. By default it contains nothing and is whole on each rank."""

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return ()

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(parameter for matrix in self.matrices for parameter in matrix.parameters)

    @property
    def ops(self) -> tuple[str, ...]:
        """Ops that the part calls besides its matrix products."""
        return ()

    def of_rank(self, share: Share) -> Self:
        """The part of one rank. SpecMismatch if ranks cannot share this part."""
        return self


class HasMatrices(Protocol):
    @property
    def matrices(self) -> tuple[Matrix, ...]: ...


def matrix_of(shape: HasMatrices, target: str) -> Matrix | None:
    """The matrix of `shape` whose weight is `target`; None for any other parameter."""
    return next((matrix for matrix in shape.matrices if matrix.weight == target), None)


def named(path: str, leaf: str) -> str:
    return f"{path}.{leaf}" if path else leaf
