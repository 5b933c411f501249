"""The empty module of a step, on meta: a block, a linear, an embedding, or a rank's part of a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from infuse.apply.unknown import build_part, over
from infuse.architectures.layer import LayerShape
from infuse.architectures.plain import EmbeddingShape, LinearShape
from infuse.architectures.split import SplitShape
from infuse.layers.block import Block
from infuse.layers.combine import SideBySide, Sum
from infuse.layers.embedding import QuantizedEmbedding, RankEmbedding
from infuse.layers.linear import make_linear
from infuse.parallel.group import LOCAL, Group
from infuse.plan.step import Step


def build(step: Step, dtype: torch.dtype, group: Group = LOCAL) -> nn.Module:
    """The empty module of a step, on meta; an embedding looks up in `dtype`. `group`: the ranks that share it."""
    with torch.device("meta"):
        return _BUILDERS[type(step.shape)](step, step.shape, dtype, group)


def _block(step: Step, shape: LayerShape, dtype: torch.dtype, group: Group) -> nn.Module:
    skips, bodies = step.skips_padding, dict(step.bodies)
    return Block(shape, step.index, step.formats, bodies, group, step.path, step.layer, skips_padding=skips)


def _part(step: Step, shape: SplitShape, dtype: torch.dtype, group: Group) -> nn.Module:
    return build_part(step, over(group))


def _embedding(step: Step, shape: EmbeddingShape, dtype: torch.dtype, group: Group) -> nn.Module:
    of_all = Sum(group, step.path) if shape.all_rows else None
    if format := step.formats.get("weight"):
        return QuantizedEmbedding(shape, format, dtype, dict(step.bodies), of_all)
    return RankEmbedding(shape, of_all)


def _linear(step: Step, shape: LinearShape, dtype: torch.dtype, group: Group) -> nn.Module:
    joined = SideBySide(group, shape.widths, step.path) if shape.widths else None
    format = step.formats.get("weight")
    return make_linear(shape.inputs, shape.outputs, shape.bias, format, dict(step.bodies), joined)


_BUILDERS: Mapping[type, Callable[[Step, Any, torch.dtype, Group], nn.Module]] = MappingProxyType(
    {LayerShape: _block, SplitShape: _part, EmbeddingShape: _embedding, LinearShape: _linear}
)
