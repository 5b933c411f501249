"""What a part of a block is built with: the formats of its matrices, the ops' bodies, and the ranks that share it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from infuse.architectures.part import ROW, Matrix
from infuse.layers.combine import Combine
from infuse.layers.linear import Linear, QuantizedLinear, make_linear
from infuse.parallel.group import LOCAL, Group


@dataclass(frozen=True)
class Surroundings:
    """`name` is the part's in the block; `formats`: target in the block → quantization format; `bodies`: op → body.

    `combine` adds up what ranks have of a sum; `index` is the layer's place in the cache.
    """

    name: str
    formats: Mapping[str, str]
    bodies: Mapping[str, str]
    group: Group = LOCAL
    combine: Combine | None = None
    index: int | None = None

    def linear(self, matrix: Matrix) -> Linear | QuantizedLinear:
        """The empty linear of a part's matrix. One whose inputs ranks split ends in their sum."""
        combine = self.combine if matrix.split == ROW else None
        return make_linear(matrix.inputs, matrix.outputs, matrix.bias, self.format(matrix), self.bodies, combine)

    def format(self, matrix: Matrix) -> str | None:
        """The quantization format of a part's matrix, None where it keeps the compute dtype."""
        return self.formats.get(f"{self.name}.{matrix.weight}")
