"""What a part of a layer holds, as data: its matrices and its other parameters, and how ranks split them.

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


@dataclass(frozen=True)
class Extent:
    """`count` units of `width` positions each along the axis that ranks split; a rank has whole units."""

    unit: str
    count: int
    width: int = 1

    @property
    def length(self) -> int:
        return self.count * self.width


@dataclass(frozen=True)
class Parameter:
    """One parameter of a part, by its name under the new module.

    `extents` lie along `axis` (0 outputs, 1 inputs) in their order: q | k | v, gate | up. Without extents every rank
    has it whole; `added_once`: only the first rank has it, since it is added to a sum over ranks.
    """

    target: str
    extents: tuple[Extent, ...] = ()
    axis: int = 0
    added_once: bool = False

    def cut(self, own: Mapping[str, Range], sources: int) -> Cut:
        """A rank's part, given its range `own` of each unit; `sources` is how many tensors the parameter is made of."""
        ranges, at = [], 0
        for extent in self.extents:
            start, stop = own[extent.unit]
            ranges.append((at + start * extent.width, at + stop * extent.width))
            at += extent.length
        sizes: tuple[int, ...] = (at,)
        if sources == len(self.extents):
            sizes = tuple(extent.length for extent in self.extents)
        elif sources > 1:  # each of them is one unit: a norm for each head
            sizes = (at // sources,) * sources
        return Cut(self.axis, tuple(ranges), sizes)


@dataclass(frozen=True)
class Matrix:
    """A weight [outputs, inputs] that a part multiplies with, and its bias; it may have a quantization format.

    `target` is the path of its linear in the new module. `extents` lie along the axis that ranks split. `op` is
    "embedding" where rows are looked up instead.
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
        """The name of the weight under the new module."""
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
    """The units that ranks have of one part: for each unit every rank's range, and which rank this is."""

    rank: int
    ranges: Mapping[str, tuple[Range, ...]]

    @property
    def own(self) -> dict[str, Range]:
        return {unit: ranges[self.rank] for unit, ranges in self.ranges.items()}

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def counts(self, unit: str) -> tuple[int, ...]:
        """How many units each rank has."""
        return tuple(stop - start for start, stop in self.ranges[unit])

    def count(self, unit: str) -> int:
        """How many units this rank has."""
        return self.counts(unit)[self.rank]


class PartShape:
    """The numbers of one part. A part says here what it holds; each property has the answer of a part without any."""

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return ()

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(parameter for matrix in self.matrices for parameter in matrix.parameters)

    @property
    def ops(self) -> tuple[str, ...]:
        """The ops that the part calls beside its products."""
        return ()

    def of_rank(self, share: Share) -> Self:
        """A rank's numbers; SpecMismatch where ranks cannot share the part."""
        return self


def extents_of(shape: PartShape, target: str) -> tuple[Extent, ...]:
    """What lies along the axis of `target` that ranks split; () where it is whole on each, or no parameter of `shape`."""
    return next((one.extents for one in shape.parameters if one.target == target), ())


class HasMatrices(Protocol):
    @property
    def matrices(self) -> tuple[Matrix, ...]: ...


def matrix_of(shape: HasMatrices, target: str) -> Matrix | None:
    """The matrix of `shape` whose weight is `target`, None for any other parameter."""
    return next((matrix for matrix in shape.matrices if matrix.weight == target), None)


def named(path: str, leaf: str) -> str:
    return f"{path}.{leaf}" if path else leaf
