"""Build and fill the new module of a step, reusing tensors that earlier modules made from the same weights."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infuse.apply.adopt import adopt, require_grad
from infuse.architectures.packing import Fill
from infuse.inputs.model import like
from infuse.layers.linear import Quantized
from infuse.parallel.group import LOCAL, Group
from infuse.plan.packed import packed_fill
from infuse.plan.shared import Sharing
from infuse.plan.step import Step
from infuse.weights.fill import fill_module, fill_saved, is_there, moves
from infuse.weights.lazy import place_of
from infuse.weights.loader import LayerSource


class Made:
    """Modules with tensors made from shared weights, by key of `Sharing`, and `proven` modules by step.

    A proven module passes its tensors to the first module that is built for its step.
    """

    def __init__(self, sharing: Sharing, proven: Iterable[tuple[Step, nn.Module]] = ()):
        self._sharing, self._proven = sharing, {(step.path, step.depth): module for step, module in proven}
        self._held: dict[Hashable, tuple[nn.Module, str]] = {}

    def share(self, step: Step, module: nn.Module) -> Sequence[Fill]:
        """Give `module` the tensors already made, and return the fills that remain."""
        left, proven = [], self._proven.pop((step.path, step.depth), None)
        for fill in step.fills:
            owner, leaf = place_of(module, fill.target)
            place = self._held.get(key := self._sharing.key(step, fill))
            is_made = not moves(fill) and (fill.format is not None or leaf in owner._parameters)
            if place is None and proven is not None and is_made:
                place = place_of(proven, fill.target)
                if key is not None:
                    self._held[key] = place
            if place is None:
                left.append(fill)
                continue
            other, its = place
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
class Making:
    """Makes modules of one kind: `build` makes one without values, `adopt` lets it replace the old one.

    `adopt` gets the new and the old module, and the step.
    """

    build: Callable[[Step, torch.dtype, Group], nn.Module]
    adopt: Callable[[nn.Module, nn.Module, Step], None]

    def empty(self, step: Step, dtype: torch.dtype, group: Group = LOCAL) -> nn.Module:
        """Build the module of `step` on meta, for a model in `dtype`. `group`: the ranks that share the module."""
        with torch.device("meta"):
            made = self.build(step, dtype, group)
        for module in made.modules():
            if isinstance(module, Quantized):
                module.dtype = dtype
        return made


@dataclass(frozen=True)
class Builder:
    """Builds new modules from the values of `source`, for this rank of `group`, each as its step's `making` says.

    The model will run in `dtype`.
    """

    source: LayerSource
    dtype: torch.dtype
    group: Group
    making: Callable[[Step], Making]
    fills: bool = True  # otherwise modules stay empty, on meta

    def built(
        self, step: Step, dtype: torch.dtype | None, made: Made | None = None, empty: nn.Module | None = None
    ) -> nn.Module:
        """Build and fill the new module in `dtype` (None: the source's).

        With `made`, it reuses tensors that earlier modules made from the same weights, and is remembered there.
        `empty`: the module if it was already built without values.
        """
        old = self.source.model.get_submodule(step.path)
        making = self.making(step)
        module = making.empty(step, self.dtype, self.group) if empty is None else empty
        fills = step.fills if made is None else made.share(step, module)
        if self.fills:
            self._fill(step, module, fills, dtype or like(old).dtype, old)
        module.train(False)
        if empty is None:
            making.adopt(module, old, step)
        else:
            require_grad(module, old)
        if made is not None:
            made.remember(step, module, fills)
        return module

    def _fill(self, step: Step, module: nn.Module, fills: Sequence[Fill], dtype: torch.dtype, old: nn.Module) -> None:
        stored = []
        if self.source.holds_replaced:
            stored = [fill for fill in fills if packed_fill(step, fill) and not is_there(fill, old)]
        computed = [fill for fill in fills if fill not in stored]
        fill_module(module, computed, self.source.tensors(step.path), dtype, dict(step.bodies))
        fill_saved(module, step.path, stored, self.source, self.dtype)

    def sharing(self, step: Step, head: nn.Module) -> nn.Module:
        """Build the embedding that shares the weight of `head`."""
        new: Any = self.making(step).empty(step, self.dtype, self.group)
        new.share(head)
        adopt(new.train(False), self.source.model.get_submodule(step.path))
        return new
