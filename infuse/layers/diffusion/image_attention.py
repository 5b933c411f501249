"""Attention over an image or a text, as in diffusers' UNets and PixArt.

Suffixes: B batch, T pixels, L pixels or tokens of a text, C width, N heads, D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from infuse import ops
from infuse.architectures.image_attention import ImageAttentionModuleShape, ImageAttentionShape
from infuse.errors import UnsupportedCall
from infuse.layers.contract import refuse_unknown
from infuse.layers.diffusion.convolution import GroupNorm
from infuse.layers.diffusion.derived import Derived
from infuse.layers.gradient import InferenceModule, is_recorded, unrecorded
from infuse.layers.linear import direct, product, untouched
from infuse.layers.surroundings import Surroundings


class ImageAttention(nn.Module):
    """Attention of pixels over themselves or over a text, whose keys and values are computed once."""

    def __init__(self, shape: ImageAttentionShape, surroundings: Surroundings):
        super().__init__()
        self.shape, bodies = shape, surroundings.bodies
        for matrix in shape.matrices:
            self.add_module(matrix.target, surroundings.linear(matrix))
        norm = shape.group_norm
        self.add_module("group_norm", None if norm is None else GroupNorm(norm, bodies))
        self._attend = ops.attention.bound(bodies.get("attention", ops.REFERENCE))
        self._of_text = Derived()

    def attended(
        self,
        x_BTC: Tensor,
        context_BLC: Tensor | None,
        mask: Tensor | None,
        residual: Tensor | None,
        turns: None = None,
    ) -> Tensor:
        """residual + out(attention of x over `context` or, without one, over x): [B, T, C]."""
        shape, parts = self.shape, self._modules
        batch, tokens, _ = x_BTC.shape
        q, k, v = self._of_itself(x_BTC) if context_BLC is None else self._over(x_BTC, context_BLC)
        if mask is not None:
            mask = spread_mask(mask, batch, shape.heads, k.shape[2])
        out = self._attend(q, k, v, mask, None, shape.scale, False, 0, 0.0)
        out = out.reshape(batch, tokens, shape.heads * shape.head_width)
        return product(parts["out"], out, None, residual)  # type: ignore[arg-type]

    def _of_itself(self, x: Tensor) -> tuple[Tensor, ...]:
        parts: dict[str, Any] = self._modules
        if self.shape.context:
            return *self._heads(direct(parts["q"], x), 1), *self._heads(direct(parts["kv"], x), 2)
        return self._heads(direct(parts["qkv"], x), 3)

    def _over(self, x: Tensor, context: Tensor) -> tuple[Tensor, ...]:
        parts: dict[str, Any] = self._modules
        if not self.shape.context:  # made for pixels alone, but called with a text
            return self._heads(direct(parts["qkv"], x), 3)[0], *self._heads(direct(parts["qkv"], context), 3)[1:]
        kv = parts["kv"]
        return *self._heads(direct(parts["q"], x), 1), *self._heads(self._once(kv, context), 2)

    def _once(self, kv: Any, context: Tensor) -> Tensor:
        """Keys and values of the text [B, L, 2 C], computed once for each text and each weight."""
        if not untouched(kv) or (torch.is_grad_enabled() and is_recorded(kv, context)):
            return direct(kv, context)
        held = [t for t in (*kv._parameters.values(), *kv._buffers.values()) if t is not None]
        return self._of_text.of((context, *held), lambda: kv.forward(context))

    def _heads(self, x_BLC: Tensor, count: int) -> tuple[Tensor, ...]:
        """The `count` tensors side by side in x as [B, N, L, D]."""
        batch, length, _ = x_BLC.shape
        split = x_BLC.view(batch, length, count, self.shape.heads, self.shape.head_width)
        return tuple(split[:, :, i].transpose(1, 2) for i in range(count))


def spread_mask(mask: Tensor, batch: int, heads: int, length: int) -> Tensor:
    """A mask [B or B N, 1 or T, L] or [B, L], as diffusers passes it, as [B, N or 1, 1 or T, L]."""
    if mask.dim() == 2:
        mask = mask[:, None]
    if mask.shape[-1] != length or mask.shape[0] not in (1, batch, batch * heads):
        raise UnsupportedCall(
            f"attention_mask has shape {list(mask.shape)}; {batch} rows of {length} keys need [{batch}, {length}], "
            f"[{batch}, 1 or queries, {length}] or the same for each of the {heads} heads"
        )
    if mask.dim() == 3 and mask.shape[0] == batch * heads and heads > 1:
        return mask.view(batch, heads, -1, length)
    return mask if mask.dim() == 4 else mask[:, None]


class ImageAttentionModule(InferenceModule, ImageAttention):
    """diffusers' Attention: hidden_states [B, T, C] or an image [B, C, H, W] -> the same shape.

    Its group norm comes before everything, its residual connection after.
    """

    def __init__(self, shape: ImageAttentionModuleShape, surroundings: Surroundings):
        super().__init__(shape.attention, surroundings)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
        **cross_attention_kwargs: Any,
    ) -> Tensor:
        """`temb` changes nothing here, as in the original without a spatial norm."""
        if cross_attention_kwargs:
            served = ("encoder_hidden_states", "attention_mask", "temb")
            refuse_unknown("Attention", (), cross_attention_kwargs, served)
        if torch.is_grad_enabled() and is_recorded(self, hidden_states):
            given = (encoder_hidden_states, attention_mask)
            return unrecorded(ImageAttentionModule.forward, self, hidden_states, *given)
        shape, x = self.shape, hidden_states
        norm = self._modules["group_norm"]
        if x.dim() == 4:
            batch, _, rows, columns = x.shape
            pixels = as_pixels(x)
            normed = pixels if norm is None else as_pixels(norm(x))
        else:
            pixels = x
            normed = x if norm is None else norm(x.transpose(1, 2)).transpose(1, 2)
        y = self.attended(normed, encoder_hidden_states, attention_mask, pixels if shape.residual else None)
        if shape.rescale != 1.0:
            y = y / shape.rescale
        return y.view(batch, rows, columns, -1).permute(0, 3, 1, 2) if x.dim() == 4 else y


def as_pixels(x_BCHW: Tensor) -> Tensor:
    """[B, H W, C]: a view if the channels are last, else a copy."""
    return x_BCHW.permute(0, 2, 3, 1).reshape(x_BCHW.shape[0], -1, x_BCHW.shape[1])
