"""Map the type of a part's shape to the layer that computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from infuse.architectures.attention import AttentionShape
from infuse.architectures.feed_forward import FeedForwardShape
from infuse.architectures.mlp import MLPShape
from infuse.architectures.moe import MoEShape
from infuse.architectures.part import PartShape
from infuse.layers.attention import Attention
from infuse.layers.diffusion.feed_forward import FeedForward
from infuse.layers.mlp import MLP
from infuse.layers.moe import MoE
from infuse.layers.surroundings import Surroundings

LAYERS: Mapping[type[PartShape], Callable[[Any, Surroundings], nn.Module]] = MappingProxyType(
    {AttentionShape: Attention, MLPShape: MLP, MoEShape: MoE, FeedForwardShape: FeedForward}
)


def make_part(shape: PartShape, surroundings: Surroundings) -> nn.Module:
    """Make the layer of a part on meta; its weights are filled in later."""
    return LAYERS[type(shape)](shape, surroundings)
