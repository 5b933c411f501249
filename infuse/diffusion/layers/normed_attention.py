"""Attention with norms of queries and keys and rotation, over tokens of an image or a video, or over a text.

Suffixes: B batch, T tokens, L tokens attended to, C width, N heads, D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from infuse import ops
from infuse.diffusion.layers.attended import Attended
from infuse.diffusion.shapes.normed_attention import NormedAttentionShape
from infuse.ground.errors import UnsupportedCall
from infuse.layers.build_context import BuildContext
from infuse.layers.calls.contract import refuse_unknown
from infuse.layers.gradient import InferenceModule, is_recorded, unrecorded
from infuse.layers.linear import direct
from infuse.layers.norm import Norm


class NormedAttention(InferenceModule, Attended):
    """forward(hidden_states [B, T, C], encoder_hidden_states [B, L, C'], attention_mask, rotation) -> [B, T, C].

    The rotation is (cos, sin) in neighbouring pairs: [T, D] or [B or 1, T, 1, D] for all heads, or [B, T, N D].
    """

    def __init__(self, shape: NormedAttentionShape, context: BuildContext):
        super().__init__(bodies := context.bodies, shape.head_width**-0.5)
        self.shape = shape
        for matrix in shape.own:
            self.add_module(matrix.target, context.linear(matrix))
        for name in ("q_norm", "k_norm"):
            norm = getattr(shape, name)
            self.add_module(name, None if norm is None else Norm(norm, bodies))
        self._turn = ops.rotary.bound(bodies.get("rotary", ops.REFERENCE))

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        shape, name = self.shape, self.shape.cos_sin
        cos_sin = args[0] if args else kwargs.pop(name, None)
        if args[1:] or kwargs:
            refuse_unknown("attention", args[1:], kwargs, ("encoder_hidden_states", "attention_mask", name))
        if torch.is_grad_enabled() and is_recorded(self, hidden_states):
            arguments = (encoder_hidden_states, attention_mask, cos_sin)
            return unrecorded(NormedAttention.forward, self, hidden_states, *arguments)
        if encoder_hidden_states is not None and cos_sin is not None and not shape.text_cos_sin:
            raise UnsupportedCall(f"{name} was given for attention over a text, whose keys have no positions here")
        if attention_mask is not None and not shape.masks:
            raise UnsupportedCall("attention_mask was given, which this attention is never called with by its model")
        return self.attended(hidden_states, encoder_hidden_states, attention_mask, None, cos_sin)

    def heads_of(self, x_BTC: Tensor, context_BLC: Tensor | None, cos_sin: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Over a context, cos and sin are left out unless the shape has `text_cos_sin`."""
        parts: dict[str, Any] = self._modules
        of_queries = cos_sin if self.shape.text_cos_sin or context_BLC is None else None
        q = self._heads(direct(parts["q"], x_BTC), parts["q_norm"], of_queries)
        if context_BLC is None:
            return q, *self._keys(x_BTC, cos_sin)
        makers = (module for name in ("k", "v", "k_norm") if (module := parts[name]) is not None)
        return q, *self.once(makers, context_BLC, lambda: self._keys(context_BLC, None))

    def _keys(self, x_BLC: Tensor, cos_sin: Any) -> tuple[Tensor, Tensor]:
        """Keys and values [B, N, L, D]."""
        parts: dict[str, Any] = self._modules
        k, v = direct(parts["k"], x_BLC), direct(parts["v"], x_BLC)
        return self._heads(k, parts["k_norm"], cos_sin), self._heads(v, None, None)

    def _heads(self, x_BTC: Tensor, norm: nn.Module | None, cos_sin: tuple[Tensor, Tensor] | None) -> Tensor:
        """x [B, T, N D], normalised and rotated, as [B, N, T, D]."""
        shape, (batch, length, width) = self.shape, x_BTC.shape
        x = x_BTC
        if norm is not None:
            wide = norm.shape.width == width  # type: ignore[union-attr]
            x = direct(norm, x if wide else x.view(batch, length, shape.heads, shape.head_width))
        if cos_sin is not None:
            cos, sin = (
                table[:, :, 0] if table.dim() == 4 else table if table.dim() == 3 else table[None] for table in cos_sin
            )
            heads = width // cos.shape[-1]
            x = self._turn(x.reshape(batch, length, heads, -1), cos.contiguous(), sin.contiguous(), True)
        return x.reshape(batch, length, shape.heads, shape.head_width).transpose(1, 2)
