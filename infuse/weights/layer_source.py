"""LayerSource: provides the original values of layers while they are replaced.

This class reads a live model; its subclass CheckpointLoader (loader.py) reads a checkpoint.
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
    """Values held by the live `model`.

    `is_live`: all values are in memory and the model runs in its own dtypes; otherwise layers may be on meta.
    `holds_replaced`: the source holds tensors of layers that were already replaced and proven when it was saved.
    """

    is_live, holds_replaced = True, False

    def __init__(self, model: nn.Module):
        self.model = model

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def put(self, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        """Set an entry of a module's mapping. On a live model this cannot be undone."""
        mapping[key] = value

    def begin(self, progress: Callable[[int, int, str], None] | None) -> None:
        """Load all values outside of the layers that will be replaced."""

    def step(self) -> None:
        """Called before each layer is replaced."""
        interrupts.tell("the layers are being replaced")

    def finish(self) -> None:
        """Load all values that are still missing."""

    def hand_on(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        """Cast a parameter that a new module takes over to `dtype`, in place for all modules that share it."""
        parameter.data = memory.copied(parameter.data, dtype)

    def running(self) -> AbstractContextManager[None]:
        """Context in which the model can run."""
        return nullcontext()

    def loaded(self, path: str) -> AbstractContextManager[None]:
        """Context in which the module at `path` has its original values."""
        return nullcontext()

    def reader(self, path: str) -> Reader:
        """Reader of the values of the module at `path`, by their names within it."""
        return LiveReader(self.model.get_submodule(path))

    def stored(self, name: str, cut: Cut | None) -> Tensor:
        """Read a tensor of a layer saved as replaced, or this rank's part of it. KeyError: a live model has none."""
        raise KeyError(name)
