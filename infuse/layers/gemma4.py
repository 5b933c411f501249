"""What Gemma 4's layers have beside attention and MLP: an input of their own for each token, and a scalar.

Suffixes: B batch, T tokens, C channels, P width of a layer's own input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from infuse import ops
from infuse.architectures.families.gemma4 import PER_LAYER, LayerScalarShape, PerLayerInputShape
from infuse.layers.attention.position import missing
from infuse.layers.build_context import BuildContext
from infuse.layers.calls.called_part import CalledPart
from infuse.layers.calls.inputs import Inputs
from infuse.layers.gradient import InferenceModule
from infuse.layers.linear import direct
from infuse.layers.native.part import NativePart, PartWriter, decline_if
from infuse.ops.cpu.activation import ACTIVATION_NUMBERS


class PerLayerInput(CalledPart, NativePart):
    """Compute projection(act(gate(x)) * what the model passes for this layer)."""

    struct, takes_value = "layer_input", True

    def __init__(self, shape: PerLayerInputShape, context: BuildContext):
        super().__init__()
        gate, projection = shape.matrices
        self.gate, self.projection = context.linear(gate), context.linear(projection)
        self._act = ops.activation.bound(context.bodies.get("activation", ops.REFERENCE))
        self._activation = shape.activation

    def mix(self, x_BTC: Tensor, inputs: Inputs, of_layer_BTP: Tensor | None) -> tuple[Tensor, None]:
        """Return the branch [B, T, C], and no attention weights."""
        if of_layer_BTP is None:
            raise missing(PER_LAYER)
        parts: dict[str, Any] = self._modules
        gated = self._act(direct(parts["gate"], x_BTC), self._activation)
        return direct(parts["projection"], gated * of_layer_BTP), None

    def native(self, to: PartWriter) -> None:
        to.put(act=ACTIVATION_NUMBERS[self._activation])
        to.part("gate")
        to.part("projection")


class LayerScalar(InferenceModule, NativePart):
    """Compute x times one number."""

    struct = "norm"

    def __init__(self, shape: LayerScalarShape, context: BuildContext):
        super().__init__()
        self.scalar = nn.Parameter(torch.empty(1), requires_grad=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return (x_BTC * self.scalar).to(x_BTC.dtype)

    def native(self, to: PartWriter) -> None:
        decline_if({"an encoder's layer has a factor": to.of_encoder})
        to.put(kind="factor")
        to.put_reals(eps=0.0, offset=0.0)
        to.tensor("weight", "scalar")
        to.tensor("bias")
