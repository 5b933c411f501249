"""The context in which a part of a block is built: formats of its matrices, bodies of ops, ranks that share it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from infuse.architectures.part import ROW, Matrix, named
from infuse.layers.linear import Linear, QuantizedLinear, make_linear
from infuse.parallel.group import LOCAL, Combine, Group


def _unknown(shape: Any, context: Any) -> nn.Module:
    raise AssertionError(f"{type(shape).__name__} is made by layers.parts.make_part")


@dataclass(frozen=True)
class BuildContext:
    """`name` is the part's name in the block, `formats` maps targets in the block to formats, `bodies` ops to bodies.

    `combine` adds up the ranks' partial sums; `index` is the layer's index in the cache. `make` makes the layer of a
    part inside (layers/parts.py).
    """

    name: str
    formats: Mapping[str, str]
    bodies: Mapping[str, str]
    group: Group = LOCAL
    combine: Combine | None = None
    index: int | None = None
    make: Callable[[Any, Any], nn.Module] = field(default=_unknown, repr=False, compare=False)

    def of(self, name: str) -> BuildContext:
        """Those of the part `name` inside this one."""
        return replace(self, name=named(self.name, name))

    def linear(self, matrix: Matrix) -> Linear | QuantizedLinear:
        """Make the empty linear of a part's matrix. A row-parallel one applies `combine`."""
        combine = self.combine if matrix.split == ROW else None
        format = self.formats.get(named(self.name, matrix.weight))
        return make_linear(matrix.inputs, matrix.outputs, matrix.bias, format, self.bodies, combine)
