"""Attention over an encoder's states, whose keys and values are computed once for an answer.

Rows that read the same states share their keys and values (cache/encoded_slot.py): all of their tokens
attend to them at once.

Suffixes: B batch, R rows of states, T new tokens, L states, H heads, D head width, C hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from infuse import ops
from infuse.architectures.families.encoder_decoder import DEALT, SHARED, STATES, STATES_MASK, CrossAttentionShape
from infuse.cache.encoded_slot import EncodedSlot, StatesCache
from infuse.cache.kv_cache import KVCache
from infuse.ground.errors import InfuseError, UnsupportedCall
from infuse.layers.attention.named_attention import named_attention
from infuse.layers.build_context import BuildContext
from infuse.layers.calls.contract import check_mask
from infuse.layers.calls.inputs import Inputs
from infuse.layers.linear import direct
from infuse.layers.mixer import Mixer
from infuse.layers.native.part import NativePart, PartWriter, decline_if

_BIAS = "position_bias"  # T5's keyword for attention functions


class CrossAttention(Mixer[CrossAttentionShape], NativePart):
    """`mix` returns (output [B, T, C], weights [B, H, T, L] or None)."""

    struct, mixed, calls_named, reads_states = "cross_attention", True, True, True

    def __init__(self, shape: CrossAttentionShape, context: BuildContext):
        super().__init__(shape, context)
        self.by_name = shape.by_name
        self.q, self.k, self.v, self.out = (context.linear(matrix) for matrix in shape.matrices)
        self._attend = ops.attention.bound(context.bodies.get("attention", ops.REFERENCE))

    def mix(self, x_BTC: Tensor, inputs: Inputs, states_BLC: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        heads, weights = self.mix_inside(x_BTC, inputs, states_BLC)
        return self.finished(heads), weights

    def finished(self, output: Tensor) -> Tensor:
        return direct(self.out, output)

    def mix_inside(self, x_BTC: Tensor, inputs: Inputs, states_BLC: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """The heads [B, T, H D], which the last matrix takes, and the weights."""
        shape, (batch, tokens, _) = self.shape, x_BTC.shape
        k, v = self._keys_and_values(inputs, states_BLC, batch)
        mask, weights = self._mask(inputs, k.shape[2]), None
        if len(k) < batch:
            together = None if inputs.want_weights or inputs.more is not None else of_states(mask, len(k), batch)
            if together is not None:
                rows = self._attended(x_BTC.reshape(len(k), -1, x_BTC.shape[-1]), k, v, *together)
                return rows.view(batch, tokens, -1), None
            k, v = (each.repeat_interleave(batch // len(each), 0) for each in (k, v))
        if inputs.more is None:
            heads_BTX = self._attended(x_BTC, k, v, mask)
            if inputs.want_weights:
                q = self._heads(direct(self.q, x_BTC))
                scored = ops.attention_weights(q, k, mask, None, shape.scale, False, 0, shape.softcap)
                weights = scored.to(x_BTC.dtype)
                if shape.head_counts:
                    weights = self._group.all_gather(weights, shape.head_counts, 1, f"weights of {shape.name}")
            return heads_BTX, weights
        self.check_named(inputs.cache, over_ranks=bool(shape.head_counts))
        attend, more = named_attention(self), dict(inputs.more)
        q = self._heads(direct(self.q, x_BTC))
        if more.get(_BIAS) is not None:  # that of attention to earlier tokens; T5 has none for states
            more[_BIAS] = q.new_zeros(1, shape.heads, tokens, k.shape[2])
        own = {"is_causal": False, "sliding_window": None, "softcap": shape.softcap or None}
        more |= {name: own[name] for name in shape.passes}
        out_BTHD, weights = attend(self, q, k, v, mask, dropout=0.0, scaling=shape.scale, **more)
        return out_BTHD.reshape(batch, tokens, shape.heads * shape.head_width), weights

    def _attended(self, x_RTC: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """The heads, [R, T, H D]."""
        q = self._heads(direct(self.q, x_RTC))
        out_RTHD = self.attend(q, k, v, mask, None, self.shape.scale, False, 0, self.shape.softcap, None)
        return out_RTHD.flatten(2)

    def native(self, to: PartWriter) -> None:
        decline_if({"ranks share the heads": self.shape.head_counts})
        to.put(heads=self.shape.heads, width=self.shape.head_width)
        to.put_reals(scale=self.shape.scale, softcap=self.shape.softcap)
        to.part("q")
        to.part("out")
        to.storage("keys", "values")

    def native_states(self, x_BTC: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Keys and values [R, H, L, D], as stored, and the mask for a call in C++; None if it must run in Python."""
        states = inputs.values[STATES]
        if states is None:
            return None
        k, v = self._keys_and_values(inputs, states, batch := len(x_BTC), stored=True)
        return self.native_of(k, v, self._mask(inputs, k.shape[2]), batch, x_BTC.dtype)

    @staticmethod
    def native_of(
        k: Tensor, v: Tensor, mask: Tensor | None, batch: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Stored keys and values, and the mask, as C++ takes them; None if it cannot."""
        together = of_states(mask, len(k), batch)
        if together is None or k.dtype != v.dtype or k.dtype not in (dtype, torch.int8):
            return None
        return k, v, *together

    def _heads(self, rows_BLC: Tensor) -> Tensor:
        return rows_BLC.unflatten(-1, (-1, self.shape.head_width)).transpose(1, 2)

    def _made(self, states_BLC: Tensor) -> tuple[Tensor, Tensor]:
        return self._heads(direct(self.k, states_BLC)), self._heads(direct(self.v, states_BLC))

    def _keys_and_values(
        self, inputs: Inputs, states_BLC: Tensor, batch: int, *, stored: bool = False
    ) -> tuple[Tensor, Tensor]:
        states_BLC = of_rows(states_BLC, batch, self.shape.rows)
        return of_an_answer(
            self, inputs, states_BLC, batch, self._made, stored=stored, shared=self.shape.rows == SHARED
        )

    def _mask(self, inputs: Inputs, length: int) -> Tensor | None:
        """The states that may be attended to, [B or 1, 1 or heads, T or 1, L]."""
        mask, shape = inputs.values.get(STATES_MASK), self.shape
        if shape.cuts_mask and isinstance(mask, Tensor):
            mask = mask[..., :length]
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


def of_an_answer(
    mixer: Mixer,
    inputs: Inputs,
    states_BLC: Tensor,
    batch: int,
    make: Callable[[Tensor], tuple[Tensor, Tensor]],
    *,
    stored: bool = False,
    shared: bool = False,
) -> tuple[Tensor, Tensor]:
    """Keys and values [R, H, L, D] of the states, as `make` makes them, computed once for an answer.

    They are those in the second half of the call's cache, which the first call of an answer fills; with `stored` in the
    cache's format. `shared`: one row of states may be that of all rows of the batch.
    """
    pair: Any = inputs.pair
    rows = batch if not shared or len(states_BLC) != 1 else 1
    if pair is None:
        _check_states(states_BLC, rows)
        if inputs.cache is not None and not isinstance(inputs.cache, KVCache):
            raise UnsupportedCall(
                f"{STATES} were given with a {type(inputs.cache).__name__}, which has no place for their keys; "
                "give an EncoderDecoderCache of transformers, or leave the cache out"
            )
        k, v = mixer.made_once(inputs, states_BLC, make)
        return k, v
    cache = pair.cross_attention_cache
    ours = isinstance(cache, StatesCache)
    if pair.is_updated.get(mixer.index):
        layer = cache.layers[mixer.index]
        held = layer.rows if ours else len(layer.keys)
        if held != batch and not (shared and held == 1):
            raise InfuseError(f"the cache holds states of {held} rows, a batch of {batch} was given")
        return _held(layer, stored) if ours else (layer.keys, layer.values)
    _check_states(states_BLC, rows)
    if ours:
        repeats = cache.repeats_of(states_BLC)
        layer = cache.slot(mixer.index)
        layer.fill(*make(states_BLC[::repeats]), repeats)
        k, v = _held(layer, stored)
    else:
        k, v = cache.update(*make(states_BLC), mixer.index)
    pair.is_updated[mixer.index] = True
    return k, v


def of_rows(states_BLC: Tensor, batch: int, rows: str) -> Tensor:
    """The states for a batch, where those of another number of rows are dealt out: one text reads several as one."""
    count = len(states_BLC)
    if rows != DEALT or count == batch or states_BLC.dim() != 3 or (count * states_BLC.shape[1]) % batch:
        return states_BLC
    return states_BLC.reshape(batch, -1, states_BLC.shape[-1])


def _check_states(states_BLC: Tensor, batch: int) -> None:
    if states_BLC.dim() != 3 or len(states_BLC) != batch:
        raise UnsupportedCall(
            f"{STATES} have shape {list(states_BLC.shape)}, and the batch has {batch} rows; give one row of states "
            "for each"
        )


def _held(slot: EncodedSlot, stored: bool) -> tuple[Tensor, Tensor]:
    keys, values = slot.storages if stored else slot.readable()
    return keys, values


def of_states(mask: Tensor | None, rows: int, batch: int) -> tuple[Tensor | None] | None:
    """The mask [R or 1, 1 or H, 1, L] of all tokens of a batch that attend to R rows of states.

    None if it hides other states from other tokens that share a row.
    """
    if mask is None:
        return (None,)
    if mask.shape[2] > 1:
        mask, all_tokens = mask[:, :, :1], mask
        if all_tokens.stride(2) and not torch.equal(mask.expand_as(all_tokens), all_tokens):
            return None
    if len(mask) in (1, rows):
        return (mask,)
    each = mask.unflatten(0, (rows, batch // rows))
    return (each[:, 0],) if torch.equal(each[:, :1].expand_as(each), each) else None
