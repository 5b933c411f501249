"""Build the new module of a step on meta and fill it: a block, a linear, an embedding, or a rank's part of a layer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from infuse.apply.adopt import adopt, require_grad, settle_parts
from infuse.architectures.deepspeed import RoutedShape
from infuse.architectures.experts import ExpertsShape
from infuse.architectures.layer import LayerShape
from infuse.architectures.module import ModuleShape
from infuse.architectures.packing import Fill
from infuse.architectures.part import ROW
from infuse.architectures.plain import EmbeddingShape, LinearShape
from infuse.architectures.split import SplitShape
from infuse.inputs.model import like
from infuse.layers.block import Block
from infuse.layers.build_context import BuildContext
from infuse.layers.called_experts import CALLED
from infuse.layers.contract import ignored_keywords
from infuse.layers.embedding import QuantizedEmbedding, RankEmbedding
from infuse.layers.linear import Quantized, make_linear
from infuse.layers.parts import make_part
from infuse.layers.routed import Routed
from infuse.parallel.group import LOCAL, Group
from infuse.plan.shared import Sharing
from infuse.plan.step import Step
from infuse.shards.save import packed_fill
from infuse.weights.fill import fill_module, fill_saved, is_there, moves
from infuse.weights.loader import LayerSource
from infuse.weights.reader import place_of


class Made:
    """Modules that hold tensors made from shared weights, by key of `Sharing`; and `proven` modules, by their steps.

    A proven module gives its tensors to the first module that is made for its step.
    """

    def __init__(self, sharing: Sharing, proven: Iterable[tuple[Step, nn.Module]] = ()):
        self._sharing, self._proven = sharing, {(step.path, step.depth): module for step, module in proven}
        self._held: dict[Hashable, tuple[nn.Module, str]] = {}

    def share(self, step: Step, module: nn.Module) -> Sequence[Fill]:
        """Give `module` the tensors already made, and return the fills that remain."""
        left, proven = [], self._proven.pop((step.path, step.depth), None)
        for fill in step.fills:
            owner, leaf = place_of(module, fill.target)
            held = self._held.get(key := self._sharing.key(step, fill))
            is_made = not moves(fill) and (fill.format is not None or leaf in owner._parameters)
            if held is None and proven is not None and is_made:
                held = place_of(proven, fill.target)
                if key is not None:
                    self._held[key] = held
            if held is None:
                left.append(fill)
                continue
            other, its = held
            if isinstance(owner, Quantized) and fill.format is not None:
                assert isinstance(other, Quantized), fill
                owner.share(other)
            elif leaf in owner._parameters:
                owner._parameters[leaf] = other._parameters[its]
            else:
                owner._buffers[leaf] = other._buffers[its]
        return left

    def remember(self, step: Step, module: nn.Module, fills: Sequence[Fill]) -> None:
        """Record that `fills` of `step` were made in `module`."""
        for fill in fills:
            if (key := self._sharing.key(step, fill)) is not None:
                self._held.setdefault(key, place_of(module, fill.target))


@dataclass(frozen=True)
class Builder:
    """Builds new modules from the values of `source`, for this rank of `group`. The model will run in `dtype`."""

    source: LayerSource
    dtype: torch.dtype
    group: Group
    fills: bool = True  # otherwise modules stay empty, on meta

    def built(
        self, step: Step, dtype: torch.dtype | None, made: Made | None = None, empty: nn.Module | None = None
    ) -> nn.Module:
        """Build and fill the new module in `dtype` (None: the source's).

        With `made`, it shares the tensors that earlier modules made from the same weights, and is remembered there.
        `empty`: what was built of this step without values before.
        """
        old = self.source.model.get_submodule(step.path)
        module = build(step, self.dtype, self.group) if empty is None else empty
        fills = step.fills if made is None else made.share(step, module)
        if self.fills:
            self._fill(step, module, fills, dtype or like(old).dtype, old)
        module.train(False)
        if empty is not None:
            require_grad(module, old)
        elif isinstance(module, Block):
            module.ignore(self._ignored(step.path, old))
        if empty is None and not step.keeps_forward:
            adopt(module, old)
            if isinstance(step.shape, ModuleShape):
                module.replaces = type(old)  # type: ignore[assignment]  # diffusers looks up blocks by their class
                settle_parts(module, old)
        if made is not None:
            made.remember(step, module, fills)
        return module

    def _fill(self, step: Step, module: nn.Module, fills: Sequence[Fill], dtype: torch.dtype, old: nn.Module) -> None:
        stored = []
        if self.source.holds_replaced:
            stored = [fill for fill in fills if packed_fill(step, fill) and not is_there(fill, old)]
        computed = [fill for fill in fills if fill not in stored]
        fill_module(module, computed, self.source.reader(step.path), dtype, dict(step.bodies))
        fill_saved(module, step.path, stored, self.source, self.dtype)

    def _ignored(self, path: str, layer: nn.Module) -> frozenset[str]:
        parts = path.split(".")
        above = (self.source.model.get_submodule(".".join(parts[:end])) for end in range(len(parts)))
        kind: Any = type(layer)
        return ignored_keywords(kind, frozenset(map(type, layer.modules())), frozenset(map(type, above)))

    def sharing(self, step: Step, head: nn.Module) -> nn.Module:
        """Build the embedding that shares the weight of `head`."""
        new: Any = build(step, self.dtype, self.group)
        new.share(head)
        adopt(new.train(False), self.source.model.get_submodule(step.path))
        return new


def build(step: Step, dtype: torch.dtype, group: Group = LOCAL) -> nn.Module:
    """Build the empty module of a step on meta. Embeddings output `dtype`; `group` holds the ranks that share it."""
    with torch.device("meta"):
        if isinstance(step.shape, ModuleShape):
            return _module(step, step.shape, group)
        return _BUILDERS[type(step.shape)](step, step.shape, dtype, group)


def _block(step: Step, shape: LayerShape, dtype: torch.dtype, group: Group) -> nn.Module:
    skips, bodies = step.skips_padding, dict(step.bodies)
    return Block(shape, step.index, step.formats, bodies, group, step.path, step.layer, skips_padding=skips)


def _module(step: Step, shape: ModuleShape, group: Group) -> nn.Module:
    dense = group.dense
    combine = dense.adds(step.path) if dense.size > 1 and step.whole is not None else None
    return make_part(shape, BuildContext("", step.formats, dict(step.bodies), dense, combine))


def _part(step: Step, shape: SplitShape, dtype: torch.dtype, group: Group) -> nn.Module:
    """A rank's linears and tables of a layer, at their paths in the layer."""
    root, bodies, formats = nn.Module(), dict(step.bodies), step.formats
    for matrix in shape.matrices:
        combined = group.dense.adds(f"{step.path}.{matrix.target}") if matrix.split == ROW else None
        format = formats.get(matrix.weight)
        owner, leaf = _place(root, matrix.target)
        owner.add_module(leaf, make_linear(matrix.inputs, matrix.outputs, matrix.bias, format, bodies, combined))
    for table in shape.tables:
        owner, leaf = _place(root, table.path)
        empty = torch.empty(table.shape, device="meta")
        if table.buffer:
            owner.register_buffer(leaf, empty)
        else:
            owner.register_parameter(leaf, nn.Parameter(empty, requires_grad=False))
    return root


def _place(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return the owner and the name of what belongs at `path`, creating missing modules above it."""
    *above, leaf = path.split(".")
    for name in above:
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    return root, leaf


def _embedding(step: Step, shape: EmbeddingShape, dtype: torch.dtype, group: Group) -> nn.Module:
    of_all = group.dense.adds(step.path) if shape.all_rows else None
    if format := step.formats.get("weight"):
        return QuantizedEmbedding(shape, format, dtype, dict(step.bodies), of_all)
    return RankEmbedding(shape, of_all)


def _linear(step: Step, shape: LinearShape, dtype: torch.dtype, group: Group) -> nn.Module:
    joined = group.dense.joins(shape.widths, step.path) if shape.widths else None
    format = step.formats.get("weight")
    return make_linear(shape.inputs, shape.outputs, shape.bias, format, dict(step.bodies), joined)


def _experts(step: Step, shape: ExpertsShape, dtype: torch.dtype, group: Group) -> nn.Module:
    cls: Any = Routed if isinstance(shape, RoutedShape) else CALLED[shape.call]
    made = cls(shape, step.formats, dict(step.bodies), group.adds(step.path) if step.whole else None)
    if isinstance(step.whole, ExpertsShape):
        made.num_experts = step.whole.count  # those that the caller routes to
    return made


_BUILDERS: Mapping[type, Callable[[Step, Any, torch.dtype, Group], nn.Module]] = MappingProxyType(
    {
        LayerShape: _block,
        SplitShape: _part,
        EmbeddingShape: _embedding,
        LinearShape: _linear,
        ExpertsShape: _experts,
        RoutedShape: _experts,
    }
)
