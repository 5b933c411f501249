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
from infuse.architectures.parts.short_conv import RecurrentShape, ShortConvShape
from infuse.cache.kv_cache import KVCache
from infuse.cache.recurrence_slot import CONV, ForeignStates, StateSlot
from infuse.ground.errors import UnsupportedCall
from infuse.layers.attention.named_attention import is_paged
from infuse.layers.build_context import BuildContext
from infuse.layers.calls.inputs import Inputs
from infuse.layers.linear import direct
from infuse.layers.mixer import Mixer
from infuse.layers.native.part import NativeInputs, NativeMixer, PartWriter, decline_if

Shape = TypeVar("Shape", bound=RecurrentShape)


class Recurrent(Mixer[Shape], NativeMixer):
    """A mixer with states; a mask tells which tokens are real, [B, T].

    A kind computes in `projected` what takes each token alone, and the rest in `over_time`. While the cache keeps the
    state after each token, that runs token by token, as in decode steps.
    """

    turned: Mapping[str, tuple[int, int]] = MappingProxyType({CONV: (1, 2)})  # axes in another order in other caches
    turns_state = False  # whether STATE is among them

    def __init__(self, shape: Shape, context: BuildContext):
        super().__init__(shape, context)
        self.by_name = False  # whatever attention function the config names
        for matrix in shape.matrices:
            self.add_module(matrix.target, context.linear(matrix))
        of: Any = shape
        self.conv = empty(of.channels, 1, of.conv.taps)
        self.register_parameter("conv_bias", empty(of.channels) if of.conv.bias else None)
        self._convolve = ops.causal_conv.bound(context.bodies.get("causal_conv", ops.REFERENCE))

    def projected(self, x_BTC: Tensor) -> tuple[Tensor, ...]:
        """What `over_time` takes of each token, [B, T, ...] each."""
        raise NotImplementedError

    def over_time(
        self, made: tuple[Tensor, ...], before: Mapping[str, Tensor], mask_BT: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What the last matrix takes, [B, T, ...], and the states after these tokens; no states before: zeros."""
        raise NotImplementedError

    def seen(self, made: tuple[Tensor, ...]) -> Tensor:
        """What the convolution sees, [B, T, C]."""
        raise NotImplementedError

    def mix(self, x_BTC: Tensor, inputs: Inputs) -> Tensor:  # type: ignore[override]
        return self.finished(self.mix_inside(x_BTC, inputs))

    def mix_inside(self, x_BTC: Tensor, inputs: Inputs) -> Tensor:
        tokens, mask = x_BTC.shape[1], self.mask_of(inputs)
        slot, states = self.begin(x_BTC, inputs)
        made = self.projected(self.masked(x_BTC, mask))
        if isinstance(slot, StateSlot) and slot.keeps_each and tokens:
            outs = []
            for t in range(tokens):
                of_token = None if mask is None else mask[:, t : t + 1]
                y, states = self.over_time(tuple(each[:, t : t + 1] for each in made), states, of_token)
                slot.end(1, states)
                outs.append(y)
            y = torch.cat(outs, dim=1)
        else:
            y, after = self.over_time(made, states, mask)
            self.end(slot, tokens, after, made)
        out: Any = self._modules["out"]
        return direct(out, y)

    def finished(self, output: Tensor) -> Tensor:
        """The result times a number, if the layer has one."""
        return output

    def convolved(
        self, x_BTC: Tensor, state: Tensor | None, gate: Tensor | None = None, out_gate: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The convolution, with SiLU unless it has gates, and its state after it."""
        parameters = self._parameters
        weight: Any = parameters["conv"]
        if state is not None:  # a cache that records the past has more rows, and the user's may have another dtype
            state = state[:, -weight.shape[-1] :].to(x_BTC.dtype).contiguous()
        return self._convolve(x_BTC, weight.flatten(1), parameters["conv_bias"], state, gate, out_gate, gate is None)

    def mask_of(self, inputs: Inputs) -> Tensor | None:
        """The mask of real tokens, [B, T]: an argument of its own where attention is beside it."""
        name = self.shape.mask_argument
        return inputs.values[name] if name else inputs.mask

    def masked(self, x_BTC: Tensor, mask_BT: Tensor | None) -> Tensor:
        """x with zeros where the mask says padding."""
        if mask_BT is None:
            return x_BTC
        if mask_BT.shape != x_BTC.shape[:2]:
            raise UnsupportedCall(
                f"{self.shape.mask_argument or 'attention_mask'} has shape {[*mask_BT.shape]}; this layer takes "
                f"[batch, tokens] of the new tokens, which are {[*x_BTC.shape[:2]]}"
            )
        return (x_BTC * mask_BT[:, :, None]).to(x_BTC.dtype)

    def begin(self, x_BTC: Tensor, inputs: Inputs) -> tuple[StateSlot | ForeignStates | None, Mapping[str, Tensor]]:
        """The slot of this layer, if there is a cache, and the states before this call."""
        if is_paged(inputs.cache):
            raise UnsupportedCall("a paged cache holds keys and values alone, and this layer keeps a state")
        slot = self.states(inputs)
        if slot is None:
            return None, {}
        states = slot.begin(x_BTC.shape[0], x_BTC.shape[1], self.filler)
        return slot, self._as_other(states) if isinstance(slot, ForeignStates) else states

    def states_in(self, cache: KVCache, index: int) -> StateSlot:
        slot = super().states_in(cache, index)
        if slot.turns is not self.turns_state:
            slot.turn(self.turns_state, self.conv.dtype)
        return slot

    def end(
        self, slot: StateSlot | ForeignStates | None, tokens: int, states: dict[str, Tensor], made: tuple[Tensor, ...]
    ) -> None:
        """Store the states after `tokens`."""
        if isinstance(slot, ForeignStates):
            slot.end(tokens, self._as_other(states), lambda: self.seen(made).transpose(1, 2))
        elif slot is not None:
            slot.end(tokens, states)

    def _as_other(self, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: state.transpose(*self.turned[name]).contiguous() if name in self.turned else state
            for name, state in states.items()
        }

    # ---- in one call of C++

    def native_conv(self, to: PartWriter) -> None:
        to.put(taps=self.conv.shape[-1])
        to.tensor("conv")
        to.tensor("conv_bias")

    def native_inputs(self, x_BTC: Tensor, inputs: Inputs) -> NativeInputs | None:
        slot, (batch, tokens, _) = self.states(inputs), x_BTC.shape
        if (
            not isinstance(slot, StateSlot)
            or slot.place is not None
            or self.mask_of(inputs) is not None
            or not slot.length
        ):
            return None
        if slot.keeps_each and tokens > 1:
            if batch > 1:
                return None
            states = slot.row_of_states(tokens, self.filler)
        else:
            states = slot.in_place(batch, tokens, self.filler)
        conv, *more = states.values()
        return NativeInputs(keys=conv, values=more[0] if more else conv, start=slot.length)

    def was_run(self, x_BTC: Tensor, inputs: Inputs) -> None:
        slot: Any = self.states(inputs)
        slot.advance(x_BTC.shape[1])


def empty(*size: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(size), requires_grad=False)


class ShortConv(Recurrent[ShortConvShape]):
    struct, mixed = "short_conv", True

    def projected(self, x_BTC: Tensor) -> tuple[Tensor, ...]:
        """The gates of the convolution's input and output, and its input."""
        into: Any = self._modules["in"]
        return direct(into, x_BTC).chunk(3, dim=-1)

    def over_time(
        self, made: tuple[Tensor, ...], before: Mapping[str, Tensor], mask_BT: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        gate, out_gate, x = made
        y, conv = self.convolved(x, before.get(CONV), gate, out_gate)
        return y, {CONV: conv}

    def seen(self, made: tuple[Tensor, ...]) -> Tensor:
        gate, _, x = made
        return x * gate

    def native(self, to: PartWriter) -> None:
        decline_if({"an encoder has no states": to.of_encoder})
        self.native_conv(to)
        to.part("in", as_field="into")
        to.part("out")
        to.storage("convolved")
