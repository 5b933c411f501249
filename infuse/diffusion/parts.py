"""Map the type of a part of diffusers' modules to the layer that computes it."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType

from infuse.diffusion.layers.block import EmbeddingNorm, ModulatedNorm, Modulation, Skip, StreamsBlock, Table
from infuse.diffusion.layers.convolution import Resnet, Upsample
from infuse.diffusion.layers.feed_forward import FeedForward
from infuse.diffusion.layers.heads import Heads
from infuse.diffusion.layers.image_attention import ImageAttention, ImageAttentionModule
from infuse.diffusion.layers.image_transformer import ImageTransformer
from infuse.diffusion.layers.normed_attention import NormedAttention
from infuse.diffusion.shapes.dit import HeadsShape
from infuse.diffusion.shapes.feed_forward import FeedForwardShape
from infuse.diffusion.shapes.image_attention import ImageAttentionModuleShape, ImageAttentionShape
from infuse.diffusion.shapes.image_transformer import ImageTransformerShape
from infuse.diffusion.shapes.normed_attention import NormedAttentionShape
from infuse.diffusion.shapes.streams import (
    EmbeddingNormShape,
    ModulatedNormShape,
    ModulationShape,
    SkipShape,
    StreamsShape,
    TableShape,
)
from infuse.diffusion.shapes.unet import ResnetShape, UpsampleShape
from infuse.layers import parts

LAYERS: parts.Layers = MappingProxyType(
    {
        FeedForwardShape: FeedForward,
        ImageAttentionModuleShape: ImageAttentionModule,
        ImageTransformerShape: ImageTransformer,
        ResnetShape: Resnet,
        UpsampleShape: Upsample,
        StreamsShape: StreamsBlock,
        NormedAttentionShape: NormedAttention,
        ImageAttentionShape: ImageAttention,
        HeadsShape: Heads,
        ModulationShape: Modulation,
        TableShape: Table,
        SkipShape: Skip,
        ModulatedNormShape: ModulatedNorm,
        EmbeddingNormShape: EmbeddingNorm,
    }
)


make_part = partial(parts.make_part, more=LAYERS)
