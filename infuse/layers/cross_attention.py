"""Attention over an encoder's states, whose keys and values are computed once for an answer.

Suffixes: B batch, T new tokens, L states, H heads, D head width, C hidden width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from infuse import ops
from infuse.architectures.encoder_decoder import STATES, STATES_MASK, CrossAttentionShape
from infuse.errors import InfuseError, UnsupportedCall
from infuse.layers.build_context import BuildContext
from infuse.layers.cache import KVCache
from infuse.layers.contract import check_mask
from infuse.layers.inputs import Inputs
from infuse.layers.linear import direct
from infuse.layers.mixer import Mixer
from infuse.layers.named_attention import named_attention
from infuse.layers.native_part import NativePart, PartWriter, decline_if

_BIAS = "position_bias"  # T5's keyword for attention functions


class CrossAttention(Mixer[CrossAttentionShape], NativePart):
    """`forward` returns (output [B, T, C], weights [B, H, T, L] or None)."""

    struct, mixed, calls_named, reads_states = "cross_attention", True, True, True

    def __init__(self, shape: CrossAttentionShape, context: BuildContext):
        super().__init__(shape, context)
        self.q, self.k, self.v, self.out = (context.linear(matrix) for matrix in shape.matrices)
        self._attend = ops.attention.bound(context.bodies.get("attention", ops.REFERENCE))

    def forward(self, x_BTC: Tensor, inputs: Inputs, states_BLC: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        shape, (batch, tokens, _) = self.shape, x_BTC.shape
        q = self._heads(direct(self.q, x_BTC))
        k, v = self._keys_and_values(inputs, states_BLC, batch)
        mask = self._mask(inputs, k.shape[2])
        weights = None
        if inputs.more is not None:
            self.check_named(inputs.cache, over_ranks=bool(shape.head_counts))
            attend, more = named_attention(self), dict(inputs.more)
            if more.get(_BIAS) is not None:  # that of attention to earlier tokens; T5 has none for states
                more[_BIAS] = q.new_zeros(1, shape.heads, tokens, k.shape[2])
            out_BTHD, weights = attend(self, q, k, v, mask, dropout=0.0, scaling=shape.scale, **more)
        else:
            out_BTHD = self._attend(q, k, v, mask, None, shape.scale, False, 0, 0.0, None)
            if inputs.want_weights:
                scored = ops.attention_weights(q, k, mask, None, shape.scale, False, 0, 0.0)
                weights = scored.to(x_BTC.dtype)
                if shape.head_counts:
                    weights = self._group.all_gather(weights, shape.head_counts, 1, f"weights of {shape.name}")
        return direct(self.out, out_BTHD.reshape(batch, tokens, shape.heads * shape.head_width)), weights

    def native(self, to: PartWriter) -> None:
        decline_if({"ranks share the heads": self.shape.head_counts})
        to.put(heads=self.shape.heads, width=self.shape.head_width)
        to.put_reals(scale=self.shape.scale)
        to.part("q")
        to.part("out")

    def native_states(self, x_BTC: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Keys and values [B, H, L, D] and the mask for a call in C++; None if it must run in Python."""
        states = inputs.values[STATES]
        if states is None:
            return None
        k, v = self._keys_and_values(inputs, states, len(x_BTC))
        return (k, v, self._mask(inputs, k.shape[2])) if k.dtype == v.dtype == x_BTC.dtype else None

    def _heads(self, rows_BLC: Tensor) -> Tensor:
        return rows_BLC.unflatten(-1, (self.shape.heads, self.shape.head_width)).transpose(1, 2)

    def _made(self, states_BLC: Tensor) -> tuple[Tensor, Tensor]:
        return self._heads(direct(self.k, states_BLC)), self._heads(direct(self.v, states_BLC))

    def _keys_and_values(self, inputs: Inputs, states_BLC: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Those in the second half of the call's cache, which the first call of an answer fills."""
        pair: Any = inputs.pair
        if pair is None:
            self._check_states(states_BLC, batch)
            if inputs.cache is not None and not isinstance(inputs.cache, KVCache):
                raise UnsupportedCall(
                    f"{STATES} were given with a {type(inputs.cache).__name__}, which has no place for their keys; "
                    "give an EncoderDecoderCache of transformers, or leave the cache out"
                )
            k, v = self.made_once(inputs, states_BLC, self._made)
            return k, v
        cache = pair.cross_attention_cache
        if pair.is_updated.get(self.index):
            layer = cache.layers[self.index]
            k, v = layer.keys, layer.values
            if len(k) != batch:  # a batch of one would be broadcast silently
                raise InfuseError(f"the cache holds states of {len(k)} rows, a batch of {batch} was given")
            return k, v
        self._check_states(states_BLC, batch)
        k, v = cache.update(*self._made(states_BLC), self.index)
        pair.is_updated[self.index] = True
        return k, v

    def _check_states(self, states_BLC: Tensor, batch: int) -> None:
        if states_BLC.dim() != 3 or len(states_BLC) != batch:
            raise UnsupportedCall(
                f"{STATES} have shape {list(states_BLC.shape)}, and the batch has {batch} rows; give one row of states "
                "for each"
            )

    def _mask(self, inputs: Inputs, length: int) -> Tensor | None:
        """The states that may be attended to, [B or 1, 1 or heads, T or 1, L]."""
        mask, shape = inputs.values[STATES_MASK], self.shape
        if mask is None or inputs.more is not None:
            return mask
        check_mask(mask, f"{shape.name} ({STATES_MASK})")
        if mask.shape[-1] not in (1, length):
            raise UnsupportedCall(
                f"{STATES_MASK} has shape {list(mask.shape)}, and there are {length} states: its last axis must be "
                f"{length}"
            )
        if shape.head_counts and mask.shape[1] == shape.all_heads:
            return mask[:, shape.first_head : shape.first_head + shape.heads]
        return mask
