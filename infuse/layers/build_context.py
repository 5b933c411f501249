"""The context in which a part of a block is built: formats of its matrices, bodies of ops, ranks that share it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from infuse.architectures.packing import Part
from infuse.architectures.part import ROW, Matrix, named
from infuse.layers.joined_linear import JoinedLinear
from infuse.layers.linear import Linear, QuantizedLinear, TransposedLinear, make_linear
from infuse.parallel.group import LOCAL, Combine, Group


def _unknown(shape: Any, context: Any) -> nn.Module:
    raise AssertionError(f"{type(shape).__name__} is made by layers.parts.make_part")


@dataclass(frozen=True)
class BuildContext:
    """`name` is the part's name in the block, `formats` maps targets in the block to formats, `bodies` ops to bodies.

    `combine` adds up the ranks' partial sums; `index` is the layer's index in the cache. `make` makes the layer of a
    part inside (layers/parts.py). `apart`: path of a matrix in the block → its parts, if these have different formats.
    `ordered`: targets whose codes are in act-order.
    """

    name: str
    formats: Mapping[str, str]
    bodies: Mapping[str, str]
    group: Group = LOCAL
    combine: Combine | None = None
    index: int | None = None
    make: Callable[[Any, Any], nn.Module] = field(default=_unknown, repr=False, compare=False)
    apart: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    ordered: frozenset[str] = frozenset()

    def of(self, name: str) -> BuildContext:
        """Those of the part `name` inside this one."""
        return replace(self, name=named(self.name, name))

    def linear(self, matrix: Matrix) -> Linear | QuantizedLinear | JoinedLinear:
        """Make the empty linear of a part's matrix. A row-parallel one applies `combine`."""
        combine, path = self.combine if matrix.split == ROW else None, named(self.name, matrix.target)
        parts = self.apart.get(path)
        if parts is None:
            return self._linear(matrix.outputs, matrix, path, combine)
        assert combine is None, path
        return JoinedLinear(
            [self._linear(part.outputs, matrix, part.path, None) for part in parts], [part.rows for part in parts]
        )

    def _linear(self, outputs: int, matrix: Matrix, path: str, combine: Combine | None) -> Linear | QuantizedLinear:
        weight = named(path, "weight")
        format, ordered = self.formats.get(weight), weight in self.ordered
        made = make_linear(matrix.inputs, outputs, matrix.bias, format, self.bodies, combine, ordered=ordered)
        assert not isinstance(made, TransposedLinear)  # which replaces a Conv1D on its own
        return made
