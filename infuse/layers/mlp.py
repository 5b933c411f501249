"""The feed-forward part: down(act(up(x))), or down(act(gate) * up) with [gate | up] in one matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from infuse import ops
from infuse.architectures.layer import MLPShape
from infuse.layers.combine import Combine
from infuse.layers.linear import Linear, QuantizedLinear, direct, fuses, make_linear, product, untouched
from infuse.layers.pickling import Pickled


def mlp_ops(shape: MLPShape) -> tuple[str, ...]:
    """What follows the product; both are one op (`linear_activation`, `quantized_linear_activation`) where nothing
    comes between them.
    """
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
        fused = ops.quantized_linear_activation if format else ops.linear_activation
        self._fused = fused.bound(bodies.get(fused.name, ops.REFERENCE))
        self._fused_reference = fused.bound(ops.REFERENCE)  # for weights that the body has no layout for
        self._activation, self._gated = shape.activation, shape.gated
        self._around = any(bodies.get(name, ops.REFERENCE) != ops.REFERENCE for name in ops.FUSED)
        rows = shape.inner * (2 if shape.gated else 1)
        self.up = make_linear(shape.hidden, rows, shape.in_bias, format, bodies)
        self.down = make_linear(
            shape.inner, shape.hidden, shape.out_bias, formats.get("mlp.down.weight"), bodies, combine
        )

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
