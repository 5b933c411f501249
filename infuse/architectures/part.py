"""Descriptors of a part's matrices and other parameters, and of how ranks split them.

Plans, formats, ranks, shards and layers iterate over these; only the part itself knows which matrices it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from infuse.parallel.slices import Cut, Range

if TYPE_CHECKING:
    from typing_extensions import Self

COLUMN, ROW, WHOLE = "column", "row", "whole"  # ranks split the outputs of a matrix, its inputs, or neither
HEADS, KV_HEADS, INNER, VOCAB = "heads", "key/value heads", "inner features", "rows of the vocabulary"
EXPERT = "experts"


@dataclass(frozen=True)
class Extent:
    """`count` units of `width` positions each along the axis that ranks split. A rank gets whole units, and no units
    of an `expert` on another rank.
    """

    unit: str
    count: int
    width: int = 1
    expert: int | None = None

    @property
    def length(self) -> int:
        return self.count * self.width


@dataclass(frozen=True)
class Parameter:
    """One parameter of a part, by its name under the new module.

    `extents` are its sections along `axis` (0 outputs, 1 inputs), in order: q | k | v, gate | up.
    Without extents, every rank holds the whole parameter or, if `added_once`, only the first rank,
    since it is added to a sum over ranks. `experts`: its rows, by expert, if ranks split another axis, too.
    """

    target: str
    extents: tuple[Extent, ...] = ()
    axis: int = 0
    added_once: bool = False
    experts: Extent | None = None

    def cut(self, of_rank: Mapping[str, Range], sources: int) -> Cut:
        """A rank's cut. `of_rank` has its range of each unit; the parameter is made from `sources` tensors."""
        ranges: list[Range] = []
        at = 0
        for extent in self.extents:
            start, stop = of_rank[extent.unit]
            if extent.expert is None or extent.expert in range(*of_rank[EXPERT]):
                ranges.append((at + start * extent.width, at + stop * extent.width))
            at += extent.length
        if self.experts is not None:
            first, last = (expert * self.experts.width for expert in of_rank[self.experts.unit])
            if ranges == [(0, at)]:
                return Cut(0, ((first, last),), (self.experts.length // sources,) * sources)
            rows = None if last - first == self.experts.length else (first, last)
            return Cut(self.axis, tuple(ranges), (at,), rows)
        if any(extent.expert is not None for extent in self.extents):
            ranges = _joined(ranges)
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
    `op` is "embedding" if rows are looked up instead of multiplied. `experts`: the rows by expert, of a matrix whose
    inputs are split. `unquantized`: why no format is applied to it, whatever the config asks.
    """

    target: str
    outputs: int
    inputs: int
    bias: bool
    split: str = WHOLE
    extents: tuple[Extent, ...] = ()
    op: str = "linear"
    experts: Extent | None = None
    unquantized: str = ""

    @property
    def weight(self) -> str:
        """Name of the weight under the new module."""
        return named(self.target, "weight")

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs, self.inputs

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        weight = Parameter(self.weight, self.extents, axis=1 if self.split == ROW else 0, experts=self.experts)
        if not self.bias:
            return (weight,)
        name = named(self.target, "bias")
        if self.split == ROW:
            return weight, Parameter(name, () if self.experts is None else (self.experts,), added_once=True)
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

    def adds(self, parameter: Parameter) -> bool:
        """Whether this rank has a parameter that one rank adds: for experts, the one with their first slice."""
        return self.own[INNER][0] == 0 if parameter.extents else self.is_first

    def counts(self, unit: str) -> tuple[int, ...]:
        """Number of units of each rank."""
        return tuple(stop - start for start, stop in self.ranges[unit])

    def count(self, unit: str) -> int:
        """Number of units of this rank."""
        return self.counts(unit)[self.rank]


class PartShape:
    """Dimensions and contents of one part. By default it contains nothing and is whole on each rank.

    `convolves`: it reads the frames around each, so padding has to be masked in it, too. `whole_rows`: padding counts
    in it, so it is not skipped.
    """

    convolves: ClassVar[bool] = False
    whole_rows: ClassVar[bool] = False

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return ()

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(parameter for matrix in self.matrices for parameter in matrix.parameters)

    @property
    def taken_extents(self) -> tuple[Extent, ...]:
        """What the part takes from other layers, in the units that ranks split."""
        return ()

    @property
    def expert_count(self) -> int:
        """Number of experts. If there are any, all ranks of the model sum the part's output: they share the experts and
        the width of each.
        """
        return next((matrix.experts.count for matrix in self.matrices if matrix.experts is not None), 0)

    @property
    def ops(self) -> tuple[str, ...]:
        """Ops that the part calls besides its matrix products."""
        return ()

    @property
    def recorded(self) -> Mapping[str, str]:
        """Modules whose results transformers records by their class: name in the new part → path in the layer."""
        return {}

    def of_rank(self, share: Share) -> Self:
        """The part of one rank. SpecMismatch if ranks cannot share this part."""
        return self


class MixerShape(PartShape):
    """A part that mixes tokens: attention or a recurrence.

    It takes over the settings of the modules at the paths `replaces` in the layer; transformers records the last of
    them by its class. `causal`: no token sees a later one, so earlier tokens can be cached. `inverted_mask`: True in a
    mask means hidden. `takes_scores_mask`: masks are over scores, [B, H or 1, T or 1, L]; if False, they are over
    tokens, and the mixer checks them itself. `continues`: a prompt in parts gives what it does as a whole. `beside`:
    the cache holds its states beside keys and values of the same layer. `mask_argument`: the layer's argument that
    carries its mask, "" for `attention_mask`. `reads_states`: it attends to an encoder's states; a layer that is given
    none leaves its branch out. `merges`: the layer's argument with states that it attends to together with the tokens,
    "" for none.
    """

    replaces: tuple[str, ...]
    causal: bool
    inverted_mask: bool
    takes_scores_mask: ClassVar[bool] = True
    continues: ClassVar[bool] = True
    reads_states: ClassVar[bool] = False
    merges: ClassVar[str] = ""
    beside: bool = False
    mask_argument: str = ""

    @property
    def mask_of_numbers(self) -> bool:
        """Whether a mask is of numbers, where 0 means hidden, and never added to scores."""
        return False

    @property
    def bias_argument(self) -> str | None:
        """The layer's argument that carries a bias of the scores."""
        return None

    @property
    def all_heads(self) -> int:
        """Query heads on all ranks: the head dimension of a mask or bias with several heads."""
        return 1

    @property
    def cached_rows(self) -> tuple[tuple[int, int], ...]:
        """Cache layout per token: (heads, width) of the keys, and of the values."""
        return ()

    @property
    def state_values(self) -> int:
        """Number of float32 values in the cached state of a sequence, whatever its length."""
        return 0


class ShapeOfParts(PartShape):
    """A part that is made of other parts, each a dataclass field. `child` is the name of a part's module, "" if its
    matrices are the module's own.
    """

    @property
    def parts(self) -> Mapping[str, PartShape]:
        """Field name → part, without absent parts."""
        return {}

    def child(self, field: str) -> str:
        return field

    def with_parts(self, parts: Mapping[str, PartShape]) -> Self:
        return replace(self, **parts)  # type: ignore[type-var]

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        parts = self.parts.items()
        return tuple(inside(self.child(field), matrix) for field, part in parts for matrix in part.matrices)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        parts = self.parts.items()
        return tuple(inside(self.child(field), parameter) for field, part in parts for parameter in part.parameters)

    @property
    def ops(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(op for part in self.parts.values() for op in part.ops))

    @property
    def recorded(self) -> Mapping[str, str]:
        return {
            named(self.child(field), name): path
            for field, part in self.parts.items()
            for name, path in part.recorded.items()
        }


Held = TypeVar("Held", Matrix, Parameter)


class HasMatrices(Protocol):
    @property
    def matrices(self) -> tuple[Matrix, ...]: ...


def matrix_of(shape: HasMatrices, target: str) -> Matrix | None:
    """The matrix of `shape` whose weight is `target`; None for any other parameter."""
    return next((matrix for matrix in shape.matrices if matrix.weight == target), None)


def _joined(ranges: list[Range]) -> list[Range]:
    """Merge adjacent ranges."""
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return joined


def inside(name: str, entry: Held) -> Held:
    """A matrix or parameter of the part `name`, with its target in the module around the part."""
    return replace(entry, target=named(name, entry.target))


def named(path: str, leaf: str) -> str:
    return f"{path}.{leaf}" if path else leaf
