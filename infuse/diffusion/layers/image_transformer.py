"""A transformer over the pixels of an image, as in diffusers' UNets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from infuse.architectures.part import Matrix
from infuse.diffusion.layers.block import StreamsBlock
from infuse.diffusion.layers.convolution import Conv, GroupNorm, laid_as
from infuse.diffusion.layers.image_attention import as_pixels
from infuse.diffusion.shapes.image_transformer import BLOCKS, ImageTransformerShape
from infuse.diffusion.shapes.unet import ConvShape
from infuse.layers.build_context import BuildContext
from infuse.layers.calls.contract import refuse_unknown
from infuse.layers.gradient import InferenceModule, is_recorded, unrecorded
from infuse.layers.linear import direct, has_no_hooks, product


class ImageTransformer(InferenceModule):
    """diffusers' Transformer2DModel: an image [B, C, H, W] -> its `sample`, of the same shape and layout.

    Between the projections pixels are rows. Where the channels of the image are last, that is a view.
    """

    def __init__(self, shape: ImageTransformerShape, context: BuildContext):
        super().__init__()
        self.norm = GroupNorm(shape.norm, context.bodies)

        def projection(layer: Matrix | ConvShape) -> nn.Module:
            return context.linear(layer) if isinstance(layer, Matrix) else Conv(layer)

        self.proj_in = projection(shape.proj_in)
        blocks = enumerate(shape.blocks)
        self.transformer_blocks = nn.ModuleList(
            StreamsBlock(block, context.of(f"{BLOCKS}.{number}")) for number, block in blocks
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
            arguments = (encoder_hidden_states, attention_mask, encoder_attention_mask)
            y = unrecorded(ImageTransformer._computed, self, hidden_states, *arguments)
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
            return y.add_(x) if has_no_hooks(project_out) else y + x
        y = product(project_out, y, None, as_pixels(x)).view(batch, rows, columns, -1).permute(0, 3, 1, 2)
        return y.contiguous() if x.is_contiguous() else y


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask as it is added to scores [B, 1, L]: -10000 where a mask [B, L] is 0."""
    return mask if mask is None or mask.dim() != 2 else ((1 - mask.to(dtype)) * -10000.0)[:, None]
