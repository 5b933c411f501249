"""Tensors on meta in other sizes than those that a call was recorded with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def resized(like: Tensor, sizes: Mapping[int, Mapping[int, Any]]) -> Tensor:
    """A tensor on meta as `like`, with other sizes: by axis, and by the size that it has there."""
    shape: list[Any] = [sizes.get(axis, {}).get(size, size) for axis, size in enumerate(like.shape)]
    strides: list[Any] = list(like.stride())
    inner: dict[int, Any] = {}  # elements in the axes inside of another → their number
    for axis in sorted(range(like.dim()), key=lambda axis: (like.stride(axis), like.shape[axis])):
        strides[axis] = inner.get(like.stride(axis), like.stride(axis))
        inner[like.stride(axis) * like.shape[axis]] = strides[axis] * shape[axis]
    return torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)
