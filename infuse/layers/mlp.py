"""The feed-forward part: down(act(up(x))), or down(act(gate) * up) with [gate | up] in one matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from infuse import ops
from infuse.layers.linear import direct, make_linear
from infuse.spec.layer import MLPShape


def mlp_ops(shape: MLPShape) -> tuple[str, ...]:
    return ("gated_activation" if shape.gated else "activation",)


class MLP(nn.Module):
    """Its `up` holds the gate above it where the MLP is gated."""

    def __init__(self, shape: MLPShape, formats: Mapping[str, str], bodies: Mapping[str, str]):
        super().__init__()
        act = ops.gated_activation if shape.gated else ops.activation
        self._act = act.body(bodies.get(act.name, ops.REFERENCE))
        self._activation = shape.activation
        rows = shape.inner * (2 if shape.gated else 1)
        self.up = make_linear(shape.hidden, rows, shape.in_bias, formats.get("mlp.up.weight"), bodies)
        self.down = make_linear(shape.inner, shape.hidden, shape.out_bias, formats.get("mlp.down.weight"), bodies)

    def forward(self, x: Tensor) -> Tensor:
        held: dict[str, Any] = self._modules
        return direct(held["down"], self._act(direct(held["up"], x), self._activation))
