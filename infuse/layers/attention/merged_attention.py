"""Attention to tokens and to an encoder's states in one softmax, with the same matrices for both: T5Gemma 2.

Keys and values of the states are computed once for an answer, without rotation, as those of cross attention are.

Suffixes: B batch, R rows of states, T new tokens, L tokens and states, S states, H heads, D head width, C hidden width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infuse import ops
from infuse.architectures.families.encoder_decoder import MERGED_MASK, STATES
from infuse.cache.kv_cache import KVCache
from infuse.ground.errors import UnsupportedCall
from infuse.layers.attention.cross_attention import of_an_answer
from infuse.layers.attention.named_attention import named_attention
from infuse.layers.attention.self_attention import Attention
from infuse.layers.calls.contract import check_mask
from infuse.layers.calls.inputs import Inputs
from infuse.layers.linear import direct
from infuse.layers.native.part import PartWriter, decline_if
from infuse.ops.cache_rows import values_of


class MergedAttention(Attention):
    """`mix` returns (output [B, T, C], weights of tokens [B, H, T, L - S] and of states [B, H, T, S], or None)."""

    def mix(  # type: ignore[override]
        self, x_BTC: Tensor, inputs: Inputs, norm: nn.Module | None = None, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        shape, (batch, tokens, _) = self.shape, x_BTC.shape
        states_BSC = inputs.values[STATES]
        if states_BSC is None:
            raise UnsupportedCall(
                f"the layer was called without {STATES}, to which it attends together with its tokens"
            )
        qkv, _ = self._products(x_BTC, norm)
        qkv_BTND = self._normalised(qkv).view(batch, tokens, self._all_heads, shape.head_width)
        positions: Any = self._modules["positions"]
        q, k, v = self._rotated(qkv_BTND, inputs, positions)
        k_RHSD, v_RHSD = of_an_answer(self, inputs, states_BSC, batch, self._of_states)
        states = k_RHSD.shape[2]
        if len(k_RHSD) < batch:
            k_RHSD, v_RHSD = (each.repeat_interleave(batch // len(each), 0) for each in (k_RHSD, v_RHSD))
        k, v = (torch.cat((values_of(own, q.dtype), of), 2) for own, of in ((k, k_RHSD), (v, v_RHSD)))
        mask, weights = self._mask(inputs, tokens, states, k.shape[2]), None
        if inputs.more is not None:
            self.check_named(inputs.cache, over_ranks=bool(shape.head_counts))
            attend = named_attention(self)
            out_BTHD, weights = attend(self, q, k, v, mask, dropout=0.0, scaling=shape.scale, **inputs.more)
        else:
            out_BTHD = self.attend(q, k, v, mask, None, shape.scale, False, 0, 0.0, None)
            if inputs.want_weights:
                weights = ops.attention_weights(q, k, mask, None, shape.scale, False, 0, 0.0).to(x_BTC.dtype)
        out = self._projected(out_BTHD.reshape(batch, tokens, -1), None, residual)
        if weights is None:
            return out, None, None
        if shape.head_counts:
            weights = self._group.all_gather(weights, shape.head_counts, 1, f"weights of {shape.name}")
        return out, weights[..., :-states], weights[..., -states:]

    def native(self, to: PartWriter) -> None:
        decline_if({"attention is to tokens and states together": True})

    def _of_states(self, states_RSC: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [R, H, S, D]: the queries that the merged matrix makes, too, are dropped."""
        parts: dict[str, Any] = self._modules
        qkv_RSND = self._normalised(direct(parts["qkv"], states_RSC)).unflatten(-1, (-1, self.shape.head_width))
        _, k, v = qkv_RSND.transpose(1, 2).split((self.shape.heads, *(self.shape.kv_heads,) * 2), dim=1)
        return k, v

    def _mask(self, inputs: Inputs, tokens: int, states: int, length: int) -> Tensor | None:
        """The keys that may be attended to, [B or 1, 1 or H, T, L]. The model's mask tells causal order and windows."""
        mask, shape = inputs.values[MERGED_MASK], self.shape
        if inputs.more is not None:
            return mask
        if mask is not None:
            check_mask(mask, f"{shape.name} ({MERGED_MASK})")
            if mask.shape[-1] != length:
                raise UnsupportedCall(
                    f"{MERGED_MASK} has shape {list(mask.shape)}, and there are {length - states} tokens and {states} "
                    f"states: its last axis must be {length}"
                )
            mask = self._of_own_heads(mask)
        if not isinstance(inputs.cache, KVCache):
            return mask
        seen = inputs.cache.slot(self.index).seen(tokens)
        if seen is None:
            return mask
        return ops.both_masks(mask, F.pad(seen, (0, states), value=True), torch.float32 if mask is None else mask.dtype)
