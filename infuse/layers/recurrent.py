"""Short convolutions and linear attention: what they share, and how they keep states between calls.

A state of a convolution is [B, taps, C] here, and [B, C, taps] in transformers' caches; one of linear attention is
[B, H, D, V], and [B, H, V, D] in those caches for state spaces. Suffixes: B batch, T tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from infuse import ops
from infuse.architectures.part import MixerShape
from infuse.architectures.short_conv import ConvShape, ShortConvShape
from infuse.errors import UnsupportedCall
from infuse.layers.build_context import BuildContext
from infuse.layers.inputs import Inputs
from infuse.layers.linear import direct
from infuse.layers.mixer import Mixer
from infuse.layers.named_attention import is_paged
from infuse.layers.native_part import NativeInputs, NativeMixer, PartWriter, decline_if
from infuse.layers.slot import CONV, ForeignStates, StateSlot

Shape = TypeVar("Shape", bound=MixerShape)


class Recurrent(Mixer[Shape], NativeMixer):
    """A mixer with states; a mask tells which tokens are real, [B, T]."""

    turned: Mapping[str, tuple[int, int]] = MappingProxyType({CONV: (1, 2)})  # axes in another order in other caches

    def __init__(self, shape: Shape, context: BuildContext):
        super().__init__(shape, context)
        self.by_name = False  # whatever attention function the config names

    def hold_conv(self, shape: ConvShape, channels: int, bodies: Mapping[str, str]) -> None:
        self.conv = nn.Parameter(torch.empty(channels, 1, shape.taps), requires_grad=False)
        bias = nn.Parameter(torch.empty(channels), requires_grad=False) if shape.bias else None
        self.register_parameter("conv_bias", bias)
        self._convolve = ops.causal_conv.bound(bodies.get("causal_conv", ops.REFERENCE))

    def convolved(
        self, x_BTC: Tensor, state: Tensor | None, gate: Tensor | None = None, out_gate: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The convolution, with SiLU unless it has gates, and its state after it."""
        parameters = self._parameters
        weight: Any = parameters["conv"]
        if state is not None:  # a cache that records the past has more rows, and the user's may have another dtype
            state = state[:, -weight.shape[-1] :].to(x_BTC.dtype).contiguous()
        return self._convolve(x_BTC, weight.flatten(1), parameters["conv_bias"], state, gate, out_gate, gate is None)

    def masked(self, x_BTC: Tensor, inputs: Inputs) -> Tensor:
        """x with zeros where the mask says padding."""
        name = self.shape.mask_argument
        mask = inputs.values[name] if name else inputs.mask
        if mask is None:
            return x_BTC
        if mask.shape != x_BTC.shape[:2]:
            raise UnsupportedCall(
                f"{name or 'attention_mask'} has shape {[*mask.shape]}; this layer takes [batch, tokens] of the new "
                f"tokens, which are {[*x_BTC.shape[:2]]}"
            )
        return (x_BTC * mask[:, :, None]).to(x_BTC.dtype)

    def begin(self, x_BTC: Tensor, inputs: Inputs) -> tuple[StateSlot | ForeignStates | None, Mapping[str, Tensor]]:
        """The slot of this layer, if there is a cache, and the states before this call."""
        if is_paged(inputs.cache):
            raise UnsupportedCall("a paged cache holds keys and values alone, and this layer keeps a state")
        slot = self.states(inputs)
        if slot is None:
            return None, {}
        states = slot.begin(x_BTC.shape[0], x_BTC.shape[1], self.filler)
        return slot, self._as_other(states) if isinstance(slot, ForeignStates) else states

    def end(self, slot: StateSlot | ForeignStates | None, tokens: int, states: dict[str, Tensor], seen: Any) -> None:
        """Store the states after `tokens`. `seen` makes what the convolution saw, for caches that keep all of it."""
        if isinstance(slot, ForeignStates):
            slot.end(tokens, self._as_other(states), lambda: seen().transpose(1, 2))
        elif slot is not None:
            slot.end(tokens, states)

    def _as_other(self, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: state.transpose(*self.turned[name]).contiguous() if name in self.turned else state
            for name, state in states.items()
        }

    # ---- in one call of C++

    def native_conv(self, to: PartWriter, shape: ConvShape) -> None:
        to.put(taps=shape.taps)
        to.tensor("conv")
        to.tensor("conv_bias")

    def native_inputs(self, x_BTC: Tensor, inputs: Inputs) -> NativeInputs | None:
        slot = self.states(inputs)
        if not isinstance(slot, StateSlot) or inputs.mask is not None or not slot.length:
            return None
        if (states := slot.in_place(x_BTC.shape[0], x_BTC.shape[1], self.filler)) is None:
            return None
        conv, *more = states.values()
        return NativeInputs(keys=conv, values=more[0] if more else conv, start=slot.length)

    def was_run(self, x_BTC: Tensor, inputs: Inputs) -> None:
        slot: Any = self.states(inputs)
        slot.advance(x_BTC.shape[1])


def empty(size: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(size), requires_grad=False)


class ShortConv(Recurrent[ShortConvShape]):
    """`forward` returns (output [B, T, C], None)."""

    struct, mixed = "short_conv", True

    def __init__(self, shape: ShortConvShape, context: BuildContext):
        super().__init__(shape, context)
        for matrix in shape.matrices:
            self.add_module(matrix.target, context.linear(matrix))
        self.hold_conv(shape.conv, shape.channels, context.bodies)

    def forward(self, x_BTC: Tensor, inputs: Inputs) -> tuple[Tensor, None]:  # type: ignore[override]
        parts: dict[str, Any] = self._modules
        slot, before = self.begin(x_BTC, inputs)
        gate, out_gate, x = direct(parts["in"], self.masked(x_BTC, inputs)).chunk(3, dim=-1)
        y, conv = self.convolved(x, before.get(CONV), gate, out_gate)
        self.end(slot, x_BTC.shape[1], {CONV: conv}, lambda: x * gate)
        return direct(parts["out"], y), None

    def native(self, to: PartWriter) -> None:
        decline_if({"an encoder has no states": to.of_encoder})
        self.native_conv(to, self.shape.conv)
        to.part("in", as_field="into")
        to.part("out")
        to.storage("convolved")
