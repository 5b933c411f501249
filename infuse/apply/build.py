"""The empty module of a step, on meta: a block, a linear, an embedding, or a rank's part of a layer."""

from __future__ import annotations

import torch
from torch import nn

from infuse.apply.unknown import build_part, over
from infuse.architectures.layer import LayerShape
from infuse.architectures.plain import EmbeddingShape
from infuse.architectures.split import SplitShape
from infuse.layers.block import Block
from infuse.layers.combine import SideBySide, Sum
from infuse.layers.embedding import QuantizedEmbedding, RankEmbedding
from infuse.layers.linear import make_linear
from infuse.parallel.group import LOCAL, Group
from infuse.plan.step import Step


def build(step: Step, dtype: torch.dtype, group: Group = LOCAL) -> nn.Module:
    """The empty module of a step, on meta; an embedding looks up in `dtype`. `group`: the ranks that share it."""
    bodies, shape, format = dict(step.bodies), step.shape, step.formats.get("weight")
    with torch.device("meta"):
        if isinstance(shape, LayerShape):
            skips = step.skips_padding
            return Block(shape, step.index, step.formats, bodies, group, step.path, step.layer, skips_padding=skips)
        if isinstance(shape, SplitShape):
            return build_part(step, over(group))
        if isinstance(shape, EmbeddingShape):
            of_all = Sum(group, step.path) if shape.all_rows else None
            return QuantizedEmbedding(shape, format, dtype, bodies, of_all) if format else RankEmbedding(shape, of_all)
        assert shape is not None, step
        joined = SideBySide(group, shape.widths, step.path) if shape.widths else None
        return make_linear(shape.inputs, shape.outputs, shape.bias, format, bodies, joined)
