"""Where the values of layers come from while they are replaced: LayerSource, and the live model as one.

The other one is a checkpoint (loader.py).
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from infuse import interrupts, memory
from infuse.parallel.slices import Cut
from infuse.weights.reader import LiveReader, Reader


class LayerSource(Protocol):
    """The values of `model`. `is_live`: it has them all and runs in its own dtypes; else layers may be on meta.

    `holds_replaced`: the source has the tensors of layers that were replaced, and proven, when it was saved.
    """

    model: nn.Module
    is_live: bool
    holds_replaced: bool

    @property
    def device(self) -> torch.device: ...

    @property
    def put(self) -> Callable[[MutableMapping[Any, Any], Any, Any], None]:
        """put(mapping, key, value) changes a module; what was there comes back where the source can give it back."""

    def begin(self, progress: Callable[[int, int, str], None] | None) -> None:
        """Give the model all values outside of layers that will be replaced."""

    def step(self) -> None:
        """The next layer is about to be replaced."""

    def finish(self) -> None:
        """Give the model all values that are still missing."""

    def hand_on(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        """Have a parameter that a new module takes over in `dtype`, for all who share it."""

    def running(self) -> AbstractContextManager[None]:
        """The model can run while inside."""

    def loaded(self, path: str) -> AbstractContextManager[None]:
        """The module at `path` has its original values while inside."""

    def reader(self, path: str) -> Reader:
        """The values of the module at `path`, by their names in it."""

    def stored(self, name: str, cut: Cut | None) -> Tensor | None:
        """A tensor of a layer that was saved as replaced, or a rank's part of it; None where there is none."""


class LiveModel:
    """A model that has its values. What is put stays: there is nothing to go back to."""

    is_live, holds_replaced = True, False

    def __init__(self, model: nn.Module):
        self.model = model

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def put(self, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        mapping[key] = value

    def begin(self, progress: Callable[[int, int, str], None] | None) -> None:
        pass

    def step(self) -> None:
        interrupts.tell("the layers are being replaced")

    def finish(self) -> None:
        pass

    def hand_on(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        parameter.data = memory.copied(parameter.data, dtype)

    def running(self) -> AbstractContextManager[None]:
        return nullcontext()

    def loaded(self, path: str) -> AbstractContextManager[None]:
        return nullcontext()

    def reader(self, path: str) -> Reader:
        return LiveReader(self.model.get_submodule(path))

    def stored(self, name: str, cut: Cut | None) -> Tensor | None:
        return None
