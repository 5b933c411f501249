"""Let layers that share weights also share the tensors made from them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import nn

from infuse.architectures.packing import Fill
from infuse.layers.linear import QuantizedLinear
from infuse.plan.shared import Sharing
from infuse.plan.step import Step
from infuse.weights.reader import place_of


class Made:
    """Modules that hold tensors made from shared weights, by key of `Sharing`."""

    def __init__(self, sharing: Sharing):
        self._sharing = sharing
        self._held: dict[Hashable, tuple[nn.Module, str]] = {}

    def share(self, step: Step, module: nn.Module) -> Sequence[Fill]:
        """Give `module` the tensors already made, and return the fills that remain."""
        left = []
        for fill in step.fills:
            held = self._held.get(self._sharing.key(step, fill))
            if held is None:
                left.append(fill)
                continue
            (owner, leaf), (other, its) = place_of(module, fill.target), held
            if isinstance(owner, QuantizedLinear) and fill.format is not None:
                assert isinstance(other, QuantizedLinear), fill
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
