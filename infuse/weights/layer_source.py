"""LayerSource: where the values of layers come from while they are replaced. The live model is one as it stands; a
checkpoint's loader (loader.py) is the other.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from infuse import interrupts, memory
from infuse.parallel.slices import Cut
from infuse.weights.reader import LiveReader, Reader


class LayerSource:
    """The values that `model` has.

    `is_live`: it has them all and runs in its own dtypes; else layers may be on meta. `holds_replaced`: the source has
    the tensors of layers that were replaced, and proven, when it was saved.
    """

    is_live, holds_replaced = True, False

    def __init__(self, model: nn.Module):
        self.model = model

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def put(self, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        """Change a module. Of a live model there is nothing to go back to."""
        mapping[key] = value

    def begin(self, progress: Callable[[int, int, str], None] | None) -> None:
        """Give the model all values outside of layers that will be replaced."""

    def step(self) -> None:
        """The next layer is about to be replaced."""
        interrupts.tell("the layers are being replaced")

    def finish(self) -> None:
        """Give the model all values that are still missing."""

    def hand_on(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        """Have a parameter that a new module takes over in `dtype`, for all who share it."""
        parameter.data = memory.copied(parameter.data, dtype)

    def running(self) -> AbstractContextManager[None]:
        """The model can run while inside."""
        return nullcontext()

    def loaded(self, path: str) -> AbstractContextManager[None]:
        """The module at `path` has its original values while inside."""
        return nullcontext()

    def reader(self, path: str) -> Reader:
        """The values of the module at `path`, by their names in it."""
        return LiveReader(self.model.get_submodule(path))

    def stored(self, name: str, cut: Cut | None) -> Tensor:
        """A tensor of a layer that was saved as replaced, or a rank's part of it; a live model has none."""
        raise KeyError(name)
