"""Attention over an image or a text, as in diffusers' UNets and PixArt.

Suffixes: B batch, T pixels, L pixels or tokens of a text, C width, N heads, D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infuse.diffusion.layers.attended import Attended
from infuse.diffusion.layers.convolution import GroupNorm
from infuse.diffusion.shapes.image_attention import ImageAttentionModuleShape, ImageAttentionShape
from infuse.layers.build_context import BuildContext
from infuse.layers.calls.contract import refuse_unknown
from infuse.layers.gradient import InferenceModule, is_recorded, unrecorded
from infuse.layers.linear import direct, has_no_hooks

_SERVED = ("encoder_hidden_states", "attention_mask")


class ImageAttention(Attended):
    """Attention of pixels over themselves or over a text, whose keys and values are computed once."""

    def __init__(self, shape: ImageAttentionShape, context: BuildContext):
        super().__init__(bodies := context.bodies, shape.scale)
        self.shape = shape
        for matrix in shape.matrices:
            self.add_module(matrix.target, context.linear(matrix))
        norm = shape.group_norm
        self.add_module("group_norm", None if norm is None else GroupNorm(norm, bodies))

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **cross_attention_kwargs: Any,
    ) -> Tensor:
        """Called inside a block, only if this module has hooks."""
        refuse_unknown("Attention", (), cross_attention_kwargs, _SERVED)
        return self.attended(hidden_states, encoder_hidden_states, attention_mask, None)

    def heads_of(self, x_BTC: Tensor, context_BLC: Tensor | None, cos_sin: None) -> tuple[Tensor, ...]:  # type: ignore[override]
        return self._of_itself(x_BTC) if context_BLC is None else self._over(x_BTC, context_BLC)

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
        of_text = self.once([kv], context, lambda: direct(kv, context))
        return *self._heads(direct(parts["q"], x), 1), *self._heads(of_text, 2)

    def _heads(self, x_BLC: Tensor, count: int) -> tuple[Tensor, ...]:
        """The `count` tensors side by side in x as [B, N, L, D]."""
        batch, length, _ = x_BLC.shape
        split = x_BLC.view(batch, length, count, self.shape.heads, self.shape.head_width)
        return tuple(split[:, :, i].transpose(1, 2) for i in range(count))


class ImageAttentionModule(InferenceModule, ImageAttention):
    """diffusers' Attention: hidden_states [B, T, C] or an image [B, C, H, W] -> the same shape.

    Its group norm comes before everything, its residual connection after.
    """

    def __init__(self, shape: ImageAttentionModuleShape, context: BuildContext):
        super().__init__(shape.attention, context)

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
            refuse_unknown("Attention", (), cross_attention_kwargs, (*_SERVED, "temb"))
        if torch.is_grad_enabled() and is_recorded(self, hidden_states):
            arguments = (encoder_hidden_states, attention_mask)
            return unrecorded(ImageAttentionModule.forward, self, hidden_states, *arguments)
        shape, x = self.shape, hidden_states
        norm = self._modules["group_norm"]
        if x.dim() == 4:
            batch, _, rows, columns = x.shape
            pixels = as_pixels(x)
            if norm is None:
                normed = pixels
            elif has_no_hooks(norm):
                normed = as_pixels(norm.forward(x))
            else:  # hooks see rows of pixels, as in the original
                normed = norm(pixels.transpose(1, 2)).transpose(1, 2)
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
