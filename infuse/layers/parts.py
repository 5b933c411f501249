"""Map the type of a part's shape to the layer that computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import nn

from infuse.architectures.families.conformer import ConvolutionShape, FactorShape, RelativeAttentionShape
from infuse.architectures.families.encoder_decoder import CrossAttentionShape, MergedAttentionShape
from infuse.architectures.families.gemma4 import LayerScalarShape, PerLayerInputShape
from infuse.architectures.part import PartShape
from infuse.architectures.parts.attention import AttentionShape
from infuse.architectures.parts.channel_delta import ChannelDeltaShape
from infuse.architectures.parts.latent_attention import LatentAttentionShape
from infuse.architectures.parts.mlp import MLPShape
from infuse.architectures.parts.moe import MoEShape
from infuse.architectures.parts.norm import NormShape
from infuse.architectures.parts.selective_scan import SelectiveScanShape
from infuse.architectures.parts.short_conv import ShortConvShape
from infuse.architectures.parts.state_attention import LinearAttentionShape
from infuse.layers.attention.conformer import Convolution, Factor, RelativeAttention
from infuse.layers.attention.cross_attention import CrossAttention
from infuse.layers.attention.latent_attention import LatentAttention
from infuse.layers.attention.merged_attention import MergedAttention
from infuse.layers.attention.self_attention import Attention
from infuse.layers.build_context import BuildContext
from infuse.layers.gemma4 import LayerScalar, PerLayerInput
from infuse.layers.mixture.moe import MoE
from infuse.layers.mlp import MLP
from infuse.layers.norm import Norm
from infuse.layers.recurrent.channel_delta import ChannelDelta
from infuse.layers.recurrent.convolved import ShortConv
from infuse.layers.recurrent.selective_scan import SelectiveScan
from infuse.layers.recurrent.state_attention import LinearAttention

Layers = Mapping[type[PartShape], Callable[[Any, BuildContext], nn.Module]]
LAYERS: Layers = MappingProxyType(
    {
        AttentionShape: Attention,
        CrossAttentionShape: CrossAttention,
        MergedAttentionShape: MergedAttention,
        LatentAttentionShape: LatentAttention,
        LinearAttentionShape: LinearAttention,
        ChannelDeltaShape: ChannelDelta,
        ShortConvShape: ShortConv,
        SelectiveScanShape: SelectiveScan,
        MLPShape: MLP,
        MoEShape: MoE,
        RelativeAttentionShape: RelativeAttention,
        ConvolutionShape: Convolution,
        FactorShape: Factor,
        PerLayerInputShape: PerLayerInput,
        LayerScalarShape: LayerScalar,
        NormShape: lambda shape, context: Norm(shape, context.bodies),
    }
)


_registered: dict[type[PartShape], Callable[[Any, BuildContext], nn.Module]] = {}  # by `register`


def register(shape: type[PartShape], layer: Callable[[Any, BuildContext], nn.Module]) -> Callable[[], object]:
    """Compute parts of this shape by layer(shape, context). Call the result to take it back."""
    _registered[shape] = layer
    return partial(_registered.pop, shape, None)


def is_extended() -> bool:
    """Whether a part is registered from outside."""
    return bool(_registered)


def make_part(shape: PartShape, context: BuildContext, more: Layers = MappingProxyType({})) -> nn.Module:
    """Make the layer of a part on meta; its weights are filled in later. `more`: layers that are not listed here."""
    kind = type(shape)
    layer = _registered.get(kind) or more.get(kind) or LAYERS[kind]
    return layer(shape, replace(context, make=partial(make_part, more=more)))
