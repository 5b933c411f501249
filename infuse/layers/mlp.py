"""The feed-forward part: down(act(up(x))), or down(act(gate) * up) with [gate | up] merged into one matrix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from infuse import ops
from infuse.architectures.parts.mlp import MLPShape
from infuse.layers.build_context import BuildContext
from infuse.layers.gradient import Settled
from infuse.layers.linear import direct, product, takes_around
from infuse.layers.multipliers import times, times_sections
from infuse.layers.native.part import NativePart, PartWriter, decline_if
from infuse.layers.norm import Norm, scaled
from infuse.ops.cpu.activation import ACTIVATION_NUMBERS


class MLP(Settled, NativePart):
    """An MLP. If it is gated, the rows of `up` are [gate | up]."""

    struct, mixed = "mlp", True

    def __init__(self, shape: MLPShape, context: BuildContext):
        super().__init__()
        bodies, (up, down) = context.bodies, shape.matrices
        act = ops.gated_activation if shape.gated else ops.activation
        self._act = act.bound(bodies.get(act.name, ops.REFERENCE))
        self.activation, self.gated = shape.activation, shape.gated
        self._factors, self._widths = shape.factors, (shape.inner, shape.inner)
        self._group, self._name = context.group, context.name
        self._wide = shape.wide
        self.up = context.linear(up)
        self.down = (replace(context, bodies={}) if shape.wide else context).linear(down)
        self.add_module("norm", Norm(shape.norm, bodies) if shape.norm else None)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.fused(x, None, residual)

    def fused(self, x: Tensor, norm: nn.Module | None, residual: Tensor | None) -> Tensor:
        """Compute residual + self(norm(x)), in two ops if the modules inside have no hooks."""
        held: dict[str, Any] = self._modules
        up, factors = held["up"], self._factors
        if factors is not None:
            x = times(x if norm is None else direct(norm, x), factors.before)
            inner = self._act(times_sections(direct(up, x), factors, self._widths), self.activation)
        elif takes_around(up):
            inner = product(up, x, norm, None, self.activation, self.gated)
        else:
            inner = self._act(product(up, x, norm), self.activation)
        if held["norm"] is not None:
            inner = self._normed(inner, held["norm"])
        if self._wide:
            inner = inner.to(held["down"].weight.dtype)
        if factors is not None:
            out = times(direct(held["down"], inner), factors.after)
            return out if residual is None else residual + out
        return product(held["down"], inner, None, residual)

    def _normed(self, inner: Tensor, norm: Norm) -> Tensor:
        if not norm.shape.whole:
            return direct(norm, inner)
        squares = inner.float().square().sum(-1)
        return scaled(inner, norm, self._group.all_reduce(squares, f"the norm of {self._name}"))

    def native(self, to: PartWriter) -> None:
        decline_if(
            {
                "an encoder's MLP has a norm inside": to.of_encoder and self._modules["norm"] is not None,
                "an MLP's last matrix is in float32": self._wide,
            }
        )
        to.put(act=ACTIVATION_NUMBERS[self.activation], gated=self.gated)
        to.part("up")
        to.part("down")
        to.part("norm")
        to.factors(self._factors, self._widths)
