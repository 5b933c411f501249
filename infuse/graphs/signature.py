"""Signatures of calls: split nested arguments into tensors and a hashable key, and rebuild them with other tensors.

Two calls with equal keys run the same kernels on tensors of the same shapes; only the tensors' values differ. This file
knows nothing of models: a ModelOutput is a mapping that takes its items as keywords.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

# Types whose values are part of the key. The key also holds the type, because True == 1.
_NUMBERS = (type(None), bool, int, float, complex, str, bytes)
_PLAIN = (*_NUMBERS, torch.dtype, torch.device, torch.layout, torch.memory_format, Enum, type)


class Unsupported(TypeError):
    """A value whose state a key cannot describe, such as a cache."""


def signature(value: Any, tensors: list[Tensor]) -> Hashable:
    """Return the key of `value` and append its tensors to `tensors` in a fixed order.

    Raise Unsupported, naming the type, for values that a key cannot describe.
    """
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided:
            raise Unsupported(f"{type(value).__name__} of layout {value.layout}")
        tensors.append(value)
        return (Tensor, tuple(value.shape), value.dtype, value.device, _strides(value))
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, slice):
        return (slice, value.start, value.stop, value.step)
    if isinstance(value, (tuple, list)):
        return (type(value), tuple(signature(item, tensors) for item in value))
    if isinstance(value, Mapping):
        return (type(value), tuple((name, signature(item, tensors)) for name, item in value.items()))
    if dataclasses.is_dataclass(value):
        return (type(value), tuple((name, signature(item, tensors)) for name, item in _fields(value)))
    raise Unsupported(type(value).__name__)


def rebuilt(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Copy the structure of `value`, with its tensors replaced by `tensors` in the order of `signature`."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, (tuple, list)):
        items = [rebuilt(item, tensors) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        made = {name: rebuilt(item, tensors) for name, item in value.items()}
        if dataclasses.is_dataclass(value):
            return type(value)(**made)
        return made if type(value) is dict else type(value)(made)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{name: rebuilt(item, tensors) for name, item in _fields(value)})
    return value


def blank(tensor: Tensor) -> Tensor:
    """Return an empty tensor like `tensor`, with its strides unless elements overlap (expanded tensors)."""
    strides = _strides(tensor)
    if strides is None or _overlaps(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _fields(value: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value) if field.init]


def _strides(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the strides, or None if contiguous. Axes of size 1 get 0, because their strides mean nothing."""
    if tensor.is_contiguous():
        return None
    return tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _overlaps(tensor: Tensor) -> bool:
    """Whether two elements may share memory. Such a tensor cannot be copied into."""
    covered = 1
    axes = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in axes if size > 1):
        if stride < covered:
            return True
        covered = stride * size
    return False
