"""The feed-forward part: down(act(up(x))), or down(act(gate) * up) with [gate | up] in one matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from infuse import ops
from infuse.architectures.layer import MLPShape
from infuse.layers.combine import Combine
from infuse.layers.linear import make_linear, product, takes_around
from infuse.layers.pickling import Pickled


def mlp_ops(shape: MLPShape) -> tuple[str, ...]:
    """What follows the product, where it is not in the product's op."""
    return ("gated_activation" if shape.gated else "activation",)


class MLP(Pickled):
    """Its `up` holds the gate above it where the MLP is gated."""

    def __init__(
        self, shape: MLPShape, formats: Mapping[str, str], bodies: Mapping[str, str], combine: Combine | None = None
    ):
        super().__init__()
        act = ops.gated_activation if shape.gated else ops.activation
        self._act = act.bound(bodies.get(act.name, ops.REFERENCE))
        format = formats.get("mlp.up.weight")
        self._activation, self._gated = shape.activation, shape.gated
        rows = shape.inner * (2 if shape.gated else 1)
        self.up = make_linear(shape.hidden, rows, shape.in_bias, format, bodies)
        self.down = make_linear(
            shape.inner, shape.hidden, shape.out_bias, formats.get("mlp.down.weight"), bodies, combine
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.fused(x, None, None)

    def fused(self, x: Tensor, norm: nn.Module | None, residual: Tensor | None) -> Tensor:
        """residual + self(norm(x)), in two ops while nothing inside is listened to."""
        held: dict[str, Any] = self._modules
        up = held["up"]
        if takes_around(up):
            inner = product(up, x, norm, None, self._activation, self._gated)
        else:
            inner = self._act(product(up, x, norm), self._activation)
        return product(held["down"], inner, None, residual)
