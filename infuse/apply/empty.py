"""Build the empty module of a step: a block, a module, a linear, an embedding, experts, or a rank's part of a layer.

`group` holds the ranks that share it. Embeddings output `dtype`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from infuse.architectures.foreign.deepspeed import RoutedShape
from infuse.architectures.foreign.plain import EmbeddingShape, LinearShape
from infuse.architectures.foreign.split import SplitShape
from infuse.architectures.layer import LayerShape
from infuse.architectures.module import ModuleShape
from infuse.architectures.part import ROW
from infuse.architectures.parts.experts import ExpertsShape
from infuse.diffusion.parts import make_part
from infuse.layers.block import Block
from infuse.layers.build_context import BuildContext
from infuse.layers.embedding import QuantizedEmbedding, RankEmbedding
from infuse.layers.linear import make_linear
from infuse.layers.mixture.called_experts import CALLED
from infuse.layers.mixture.routed import Routed
from infuse.parallel.group import Group
from infuse.plan.step import Step


def block(step: Step, dtype: torch.dtype, group: Group) -> nn.Module:
    shape = step.shape
    assert isinstance(shape, LayerShape), step
    return Block(
        shape,
        step.index,
        step.formats,
        dict(step.bodies),
        group,
        step.path,
        step.layer,
        skips_padding=step.skips_padding,
        apart=step.apart,
        ordered=step.ordered,
    )


def module(step: Step, dtype: torch.dtype, group: Group) -> nn.Module:
    shape = step.shape
    assert isinstance(shape, ModuleShape), step
    dense = group.dense
    combine = dense.adds(step.path) if dense.size > 1 and step.whole is not None else None
    return make_part(shape, BuildContext("", step.formats, dict(step.bodies), dense, combine, ordered=step.ordered))


def rank_part(step: Step, dtype: torch.dtype, group: Group) -> nn.Module:
    """Build a rank's linears and tables of a layer, at their paths in the layer."""
    shape = step.shape
    assert isinstance(shape, SplitShape), step
    root, bodies, formats = nn.Module(), dict(step.bodies), step.formats
    turned = {fill.target for fill in step.fills if fill.transposed}
    for matrix in shape.matrices:
        combined = group.dense.adds(f"{step.path}.{matrix.target}") if matrix.split == ROW else None
        format, ordered = formats.get(matrix.weight), matrix.weight in step.ordered
        owner, leaf = _place(root, matrix.target)
        sizes, is_turned = (matrix.inputs, matrix.outputs), matrix.weight in turned
        made = make_linear(*sizes, matrix.bias, format, bodies, combined, ordered=ordered, transposed=is_turned)
        owner.add_module(leaf, made)
    for table in shape.tables:
        owner, leaf = _place(root, table.path)
        empty = torch.empty(table.shape, device="meta")
        if table.buffer:
            owner.register_buffer(leaf, empty)
        else:
            owner.register_parameter(leaf, nn.Parameter(empty, requires_grad=False))
    return root


def _place(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return the owner and leaf name for `path`, creating missing modules above it."""
    *above, leaf = path.split(".")
    for name in above:
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    return root, leaf


def embedding(step: Step, dtype: torch.dtype, group: Group) -> nn.Module:
    shape = step.shape
    assert isinstance(shape, EmbeddingShape), step
    of_all = group.dense.adds(step.path) if shape.all_rows else None
    if format := step.formats.get("weight"):
        return QuantizedEmbedding(shape, format, dtype, dict(step.bodies), of_all)
    return RankEmbedding(shape, of_all)


def linear(step: Step, dtype: torch.dtype, group: Group) -> nn.Module:
    shape = step.shape
    assert isinstance(shape, LinearShape), step
    joined = group.dense.joins(shape.widths, step.path) if shape.widths else None
    format, ordered = step.formats.get("weight"), "weight" in step.ordered
    sizes, bodies = (shape.inputs, shape.outputs), dict(step.bodies)
    return make_linear(*sizes, shape.bias, format, bodies, joined, ordered=ordered, transposed=shape.transposed)


def experts(step: Step, dtype: torch.dtype, group: Group) -> nn.Module:
    shape = step.shape
    assert isinstance(shape, ExpertsShape), step
    cls: Any = Routed if isinstance(shape, RoutedShape) else CALLED[shape.call]
    made = cls(shape, step.formats, dict(step.bodies), group.adds(step.path) if step.whole else None)
    if isinstance(step.whole, ExpertsShape):
        made.num_experts = step.whole.count  # the number that the caller routes to
    return made


def nothing(step: Step, dtype: torch.dtype, group: Group) -> nn.Module:
    """The step for attention makes no module."""
    raise AssertionError(step)
