"""Reader: read tensors by name from a live module or from files through one interface, `read(name, part)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

Slices = tuple[slice, ...]  # slices of the leading axes, step 1; () is the whole tensor


@dataclass(frozen=True)
class Stored:
    """Shape and dtype of a tensor, known before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Reader(Protocol):
    """Tensors by name. `part` selects a slice, so that a rank reads only its shard."""

    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str, part: Slices = ()) -> Tensor: ...
    def coded(self, name: str) -> Coded | None:
        """How a tensor is stored if its source has it in a format of ours; `read` gives its values nevertheless."""


@dataclass(frozen=True)
class Coded:
    """A tensor stored in `format`: readers of its codes and scales, with its axes; inputs are fewer by a factor."""

    format: str
    data: Reader
    scale: Reader


class LiveReader:
    """Read the parameters and buffers of a module in memory without copying."""

    def __init__(self, module: nn.Module):
        self._module = module

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(tensor_at(self._module, name).shape)

    def read(self, name: str, part: Slices = ()) -> Tensor:
        found = tensor_at(self._module, name)
        return found[part] if part else found

    def coded(self, name: str) -> Coded | None:
        return None


def place_of(module: nn.Module, name: str) -> tuple[Any, str]:
    """Return the module that holds the tensor with this dotted name, and its name there."""
    owner, _, leaf = name.rpartition(".")
    return module.get_submodule(owner), leaf


def tensor_at(module: nn.Module, name: str) -> Tensor:
    """Return the parameter or buffer with this dotted name."""
    found = getattr(*place_of(module, name))
    assert isinstance(found, Tensor), name
    return found
