"""RMSNorm and LayerNorm, alone or fused with the residual addition before them, and layer scale."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from infuse import ops
from infuse.architectures.parts.norm import RMS, SCALE, NormShape
from infuse.layers.gradient import Settled
from infuse.layers.native.part import NativePart, PartWriter, decline_if


class Norm(Settled, NativePart):
    """`forward(x)` normalises x; `add(x, residual)` returns (x + residual, norm of that sum), but for a layer scale."""

    struct = "norm"

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, shape: NormShape, bodies: Mapping[str, str]):
        super().__init__()
        self.shape = shape
        rms = shape.kind == RMS
        alone, fused = (ops.rms_norm, ops.add_rms_norm) if rms else (ops.layer_norm, ops.add_layer_norm)
        self._alone = alone.bound(bodies.get(alone.name, ops.REFERENCE))
        self._fused = fused.bound(bodies.get(fused.name, ops.REFERENCE))
        self.register_parameter("weight", _empty(shape.weight))
        self.register_parameter("bias", _empty(shape.weight if shape.bias else None))
        self._rms, self._eps, self._offset = rms, shape.eps, shape.offset

    def forward(self, x: Tensor) -> Tensor:
        parameters = self._parameters
        if self._rms:
            return self._alone(x, parameters["weight"], self._eps, self._offset)
        if self.shape.kind == SCALE:
            return x * self.weight  # type: ignore[operator]
        return self._alone(x, parameters["weight"], parameters["bias"], self._eps, self._offset)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        parameters = self._parameters
        if self._rms:
            return self._fused(x, residual, parameters["weight"], self._eps, self._offset)
        return self._fused(x, residual, parameters["weight"], parameters["bias"], self._eps, self._offset)

    @property
    def arguments(self) -> tuple:
        """Arguments of this norm for an op that normalises before its product (ops/linear.py)."""
        return self.shape.kind, self.weight, self.bias, self._eps, self._offset

    def native(self, to: PartWriter) -> None:
        shape = self.shape
        decline_if(
            {
                "a norm spans the heads of all ranks": shape.whole,
                "heads have norms of their own": shape.weight is not None and len(shape.weight) != 1,
            }
        )
        to.put(kind=shape.kind)
        to.put_reals(eps=shape.eps, offset=shape.offset)
        to.tensor("weight")
        to.tensor("bias")

    def extra_repr(self) -> str:
        return f"{self.shape.kind}, {self.shape.width}, eps={self.shape.eps}"


def scaled(x: Tensor, norm: Norm, squares: Tensor) -> Tensor:
    """Apply an RMS norm to x [..., a rank's columns], given the sum of squares over the columns of all ranks, [...]."""
    assert norm.weight is not None
    shape = norm.shape
    normed = x.float() * torch.rsqrt(squares[..., None] / shape.whole + shape.eps)
    return (normed * (norm.weight.float() + shape.offset)).to(x.dtype)


def _empty(shape: tuple[int, ...] | None) -> nn.Parameter | None:
    return None if shape is None else nn.Parameter(torch.empty(shape), requires_grad=False)
