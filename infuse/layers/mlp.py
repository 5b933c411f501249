"""The feed-forward part: down(act(up(x))), or down(act(gate) * up) with [gate | up] in one matrix."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from infuse import ops
from infuse.architectures.mlp import MLPShape
from infuse.layers.linear import Linear, QuantizedLinear, direct, fuses, product, untouched
from infuse.layers.pickling import Pickled
from infuse.layers.surroundings import Surroundings


class MLP(Pickled):
    """Its `up` holds the gate above it where the MLP is gated."""

    def __init__(self, shape: MLPShape, surroundings: Surroundings):
        super().__init__()
        bodies, (up, down) = surroundings.bodies, shape.matrices
        act = ops.gated_activation if shape.gated else ops.activation
        self._act = act.bound(bodies.get(act.name, ops.REFERENCE))
        fused = ops.quantized_linear_activation if surroundings.format(up) else ops.linear_activation
        self._fused = fused.bound(bodies.get(fused.name, ops.REFERENCE))
        self._fused_reference = fused.bound(ops.REFERENCE)  # for weights that the body has no layout for
        self._activation, self._gated = shape.activation, shape.gated
        self._around = any(bodies.get(name, ops.REFERENCE) != ops.REFERENCE for name in ops.FUSED)
        self.up, self.down = surroundings.linear(up), surroundings.linear(down)

    def forward(self, x: Tensor) -> Tensor:
        held: dict[str, Any] = self._modules
        if self._around:
            return self.fused(x, None, None)
        return direct(held["down"], self._inner(x, held["up"]))

    def _inner(self, x: Tensor, up: nn.Module) -> Tensor:
        if isinstance(up, (Linear, QuantizedLinear)) and untouched(up):
            fused = self._fused if not isinstance(up, QuantizedLinear) or up.prepared else self._fused_reference
            return fused(x, *up.arguments(), self._activation, self._gated)
        return self._act(direct(up, x), self._activation)

    def fused(self, x: Tensor, norm: nn.Module | None, residual: Tensor | None) -> Tensor:
        """residual + self(norm(x)), in two ops where both linears fuse."""
        held: dict[str, Any] = self._modules
        up = held["up"]
        if fuses(up):
            inner = product(up, x, norm, None, self._activation, self._gated)
        else:
            inner = self._act(product(up, x, norm), self._activation)
        return product(held["down"], inner, None, residual)
