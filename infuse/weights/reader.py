"""Where values come from: one interface, `read(name)`. A live module is the source here; files come by the same door."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn


class Reader(Protocol):
    """A source of tensors by name."""

    def read(self, name: str) -> Tensor: ...


class LiveReader:
    """The parameters and buffers of a module in memory. Tensors are handed out as they are, not copied."""

    def __init__(self, module: nn.Module):
        self._module = module

    def read(self, name: str) -> Tensor:
        owner, _, leaf = name.rpartition(".")
        found = getattr(self._module.get_submodule(owner), leaf)
        assert isinstance(found, Tensor), name
        return found
