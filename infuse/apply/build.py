"""Build the empty module of a step on meta: a block, a linear, an embedding, or a rank's part of a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from infuse.architectures.layer import LayerShape
from infuse.architectures.part import ROW
from infuse.architectures.plain import EmbeddingShape, LinearShape
from infuse.architectures.split import SplitShape
from infuse.layers.block import Block
from infuse.layers.combine import Combine, SideBySide, Sum
from infuse.layers.embedding import QuantizedEmbedding, RankEmbedding
from infuse.layers.linear import make_linear
from infuse.parallel.group import LOCAL, Group
from infuse.plan.step import Step


def build(step: Step, dtype: torch.dtype, group: Group = LOCAL) -> nn.Module:
    """Build the empty module of a step on meta. Embeddings output `dtype`; `group` holds the ranks that split it."""
    with torch.device("meta"):
        return _BUILDERS[type(step.shape)](step, step.shape, dtype, group)


def _block(step: Step, shape: LayerShape, dtype: torch.dtype, group: Group) -> nn.Module:
    skips, bodies = step.skips_padding, dict(step.bodies)
    return Block(shape, step.index, step.formats, bodies, group, step.path, step.layer, skips_padding=skips)


def _part(step: Step, shape: SplitShape, dtype: torch.dtype, group: Group) -> nn.Module:
    return build_part(step, partial(Sum, group))


def build_part(step: Step, combine: Callable[[str], Combine]) -> nn.Module:
    """Build a rank's linears and tables of a layer on meta, at their paths in the layer.

    `combine(path)` returns the function that combines a row linear's outputs across ranks.
    """
    assert isinstance(step.shape, SplitShape)
    root, bodies, formats = nn.Module(), dict(step.bodies), step.formats
    for matrix in step.shape.matrices:
        combined = combine(f"{step.path}.{matrix.target}") if matrix.split == ROW else None
        format = formats.get(matrix.weight)
        owner, _, leaf = matrix.target.rpartition(".")
        made = make_linear(matrix.inputs, matrix.outputs, matrix.bias, format, bodies, combined)
        _owner(root, owner).add_module(leaf, made)
    for table in step.shape.tables:
        owner, _, leaf = table.path.rpartition(".")
        empty = torch.empty(table.shape, device="meta")
        if table.buffer:
            _owner(root, owner).register_buffer(leaf, empty)
        else:
            _owner(root, owner).register_parameter(leaf, nn.Parameter(empty, requires_grad=False))
    return root


def _owner(root: nn.Module, path: str) -> nn.Module:
    """Return the module at `path`, creating it and its parents if missing."""
    for name in filter(None, path.split(".")):
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    return root


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
