"""Attention over an image or a text, and transformer blocks of it, as in diffusers' UNets and PixArt.

Suffixes: B batch, T pixels, L pixels or tokens of a text, C width, N heads, D width of a head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from infuse import ops
from infuse.architectures.image_attention import (
    ImageAttentionModuleShape,
    ImageAttentionShape,
    ImageTransformerShape,
    TransformerBlockShape,
)  # fmt: skip
from infuse.architectures.part import Matrix, named
from infuse.architectures.unet import ConvShape
from infuse.errors import UnsupportedCall
from infuse.layers.contract import refuse_unknown
from infuse.layers.diffusion.convolution import Conv, GroupNorm, laid_as
from infuse.layers.diffusion.derived import Derived
from infuse.layers.gradient import InferenceModule, is_recorded, unrecorded
from infuse.layers.linear import direct, product, untouched
from infuse.layers.mlp import MLP
from infuse.layers.norm import Norm
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
        self, x_BTC: Tensor, context_BLC: Tensor | None, mask: Tensor | None, residual: Tensor | None
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


class TransformerBlock(InferenceModule):
    """diffusers' BasicTransformerBlock: hidden_states [B, T, C] -> [B, T, C]."""

    def __init__(self, shape: TransformerBlockShape, surroundings: Surroundings):
        super().__init__()
        bodies = surroundings.bodies
        for name in ("norm1", "norm2", "norm3"):
            norm = None if shape.modulated else getattr(shape, name)
            self.add_module(name, None if norm is None else Norm(norm, bodies))
        for name in ("attn1", "attn2"):
            attention = getattr(shape, name)
            own = replace(surroundings, name=named(surroundings.name, name))
            self.add_module(name, None if attention is None else ImageAttention(attention, own))
        self.ff = MLP(shape.ff, replace(surroundings, name=named(surroundings.name, "ff")))
        table = nn.Parameter(torch.empty(6, shape.attn1.hidden), requires_grad=False) if shape.modulated else None
        self.register_parameter("scale_shift_table", table)
        self._eps = shape.norm1.eps, shape.norm1.eps if shape.norm2 is None else shape.norm2.eps  # of modulated norms
        self._norm = ops.modulated_norm.bound(bodies.get("modulated_norm", ops.REFERENCE))
        self._add = ops.gated_add.bound(bodies.get("gated_add", ops.REFERENCE))
        self._add_norm = ops.gated_add_norm.bound(bodies.get("gated_add_norm", ops.REFERENCE))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        timestep: Tensor | None = None,
        cross_attention_kwargs: dict[str, Any] | None = None,
        class_labels: Tensor | None = None,
        added_cond_kwargs: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """`timestep` [B, 6 C] is read only if the block is modulated; class_labels and added_cond_kwargs never."""
        if cross_attention_kwargs:
            refuse_unknown("BasicTransformerBlock", (), cross_attention_kwargs)
        if torch.is_grad_enabled() and is_recorded(self, hidden_states):
            given = (attention_mask, encoder_hidden_states, encoder_attention_mask, timestep)
            return unrecorded(TransformerBlock.forward, self, hidden_states, *given)
        parts: dict[str, Any] = self._modules
        attn1, attn2, x = parts["attn1"], parts["attn2"], hidden_states
        if self.scale_shift_table is not None:
            return self._modulated(x, attention_mask, encoder_hidden_states, encoder_attention_mask, timestep)
        after = parts["norm3" if attn2 is None else "norm2"]
        x, y = after.add(attn1.attended(direct(parts["norm1"], x), None, attention_mask, None), x)
        if attn2 is not None:
            branch = attn2.attended(y, encoder_hidden_states, encoder_attention_mask, None)
            x, y = parts["norm3"].add(branch, x)
        return parts["ff"].fused(y, None, x)

    def _modulated(
        self, x: Tensor, mask: Tensor | None, text: Tensor | None, text_mask: Tensor | None, timestep: Any
    ) -> Tensor:
        """The block of PixArt: shift, scale and gate of attn1 and of the feed-forward come from the time step."""
        parts: dict[str, Any] = self._modules
        table: Any = self._parameters["scale_shift_table"]
        attn1, attn2, ff = parts["attn1"], parts["attn2"], parts["ff"]
        vectors = (table[None] + timestep.reshape(x.shape[0], 6, -1)).unbind(dim=1)
        shift1, scale1, gate1, shift2, scale2, gate2 = vectors
        branch = attn1.attended(self._norm(x, scale1, shift1, self._eps[0]), None, mask, None)
        if attn2 is None:
            x, y = self._add_norm(branch, gate1, x, scale2, shift2, self._eps[1])
        else:
            x = self._add(branch, gate1, x)
            x = attn2.attended(x, text, text_mask, x)
            y = self._norm(x, scale2, shift2, self._eps[1])
        return self._add(ff(y), gate2, x)


class ImageTransformer(InferenceModule):
    """diffusers' Transformer2DModel: an image [B, C, H, W] -> its `sample`, of the same shape and layout.

    Between the projections pixels are rows. Where the channels of the image are last, that is a view.
    """

    def __init__(self, shape: ImageTransformerShape, surroundings: Surroundings):
        super().__init__()
        self.norm = GroupNorm(shape.norm, surroundings.bodies)

        def projection(one: Matrix | ConvShape) -> nn.Module:
            return surroundings.linear(one) if isinstance(one, Matrix) else Conv(one)

        self.proj_in = projection(shape.proj_in)
        blocks = enumerate(shape.blocks)
        self.transformer_blocks = nn.ModuleList(
            TransformerBlock(one, replace(surroundings, name=f"transformer_blocks.{number}")) for number, one in blocks
        )
        self.proj_out = projection(shape.proj_out)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        timestep: Tensor | None = None,
        added_cond_kwargs: dict[str, Tensor] | None = None,
        class_labels: Tensor | None = None,
        cross_attention_kwargs: dict[str, Any] | None = None,
        attention_mask: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        return_dict: bool = True,
    ) -> Any:
        """Masks [B, L] of 0 and 1, or additive ones [B, 1, L]. As in the original with norms that have no
        modulation, `timestep`, `added_cond_kwargs` and `class_labels` change nothing.
        """
        if cross_attention_kwargs:
            refuse_unknown("Transformer2DModel", (), cross_attention_kwargs)
        if torch.is_grad_enabled() and is_recorded(self, hidden_states):
            given = (encoder_hidden_states, attention_mask, encoder_attention_mask)
            y = unrecorded(ImageTransformer._computed, self, hidden_states, *given)
        else:
            y = self._computed(hidden_states, encoder_hidden_states, attention_mask, encoder_attention_mask)
        if not return_dict:
            return (y,)
        from diffusers.models.modeling_outputs import Transformer2DModelOutput  # only its users have diffusers

        return Transformer2DModelOutput(sample=y)

    def _computed(
        self, hidden_states: Tensor, text: Tensor | None, mask: Tensor | None, text_mask: Tensor | None
    ) -> Tensor:
        parts: dict[str, Any] = self._modules
        project_in, project_out, x = parts["proj_in"], parts["proj_out"], hidden_states
        batch, _, rows, columns = x.shape
        mask, text_mask = _additive(mask, x.dtype), _additive(text_mask, x.dtype)
        if isinstance(project_in, nn.Conv2d):
            x = laid_as(project_in, x)
            y = as_pixels(project_in(parts["norm"](x)))
        else:
            y = direct(project_in, as_pixels(parts["norm"](x)))
        for block in parts["transformer_blocks"]:
            y = block(y, mask, text, text_mask)
        if isinstance(project_out, nn.Conv2d):
            y = project_out(y.view(batch, rows, columns, -1).permute(0, 3, 1, 2))
            return y.add_(x) if untouched(project_out) else y + x
        y = product(project_out, y, None, as_pixels(x)).view(batch, rows, columns, -1).permute(0, 3, 1, 2)
        return y.contiguous() if x.is_contiguous() else y


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask as it is added to scores [B, 1, L]: -10000 where a mask [B, L] is 0."""
    return mask if mask is None or mask.dim() != 2 else ((1 - mask.to(dtype)) * -10000.0)[:, None]
