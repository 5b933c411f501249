"""Sizes of a traced call that are variables, such as batch and tokens: branches of a layer on them show."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource  # transformers' models import it too
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from infuse.reading.graph import is_in_layer


class Variables:
    """The sizes of a call that vary, by their numbers in the call. `sums`: numbers that are the sum of two others."""

    def __init__(self, numbers: Collection[int], sums: Iterable[tuple[int, int]]):
        self._env = ShapeEnv()
        made = {a + b for a, b in sums}
        self._known = {number: self._variable(number) for number in sorted(numbers) if number not in made}
        for a, b in sums:
            self._known[a + b] = self._known.get(a, a) + self._known.get(b, b)

    def _variable(self, number: int) -> Any:
        like, context = torch.empty(number, device="meta"), StatelessSymbolicContext([DimDynamic.DYNAMIC])
        source = ConstantSource(f"size_{number}")
        sizes, _, _ = self._env.create_symbolic_sizes_strides_storage_offset(like, source, symbolic_context=context)
        return sizes[0]

    def tensor(self, like: Tensor, axes: Iterable[int]) -> Tensor:
        """A tensor on meta as `like`, whose sizes in `axes` are variables where they are known."""
        return resized(like, dict.fromkeys(axes, self._known))

    def branches(self) -> str:
        """What a layer's branches assume of the variables; empty if all sizes from 2 on take the same way."""
        places = [_place(guard) for guard in self._env.guards]
        ranges = [
            f"from {bounds.lower} to {bounds.upper}" if bounds.lower != bounds.upper else f"it is {bounds.lower} alone"
            for symbol, bounds in self._env.var_to_range.items()
            if not (str(bounds.lower) in ("0", "1", "2") and _is_endless(bounds.upper))
        ]
        return ", ".join(dict.fromkeys(filter(None, [*places, *ranges])))


def resized(like: Tensor, sizes: Mapping[int, Mapping[int, Any]]) -> Tensor:
    """A tensor on meta as `like`, with other sizes: by axis, and by the size that it has there."""
    shape: list[Any] = [sizes.get(axis, {}).get(size, size) for axis, size in enumerate(like.shape)]
    strides: list[Any] = list(like.stride())
    inner: dict[int, Any] = {}  # elements in the axes inside of another → their number
    for axis in sorted(range(like.dim()), key=lambda axis: (like.stride(axis), like.shape[axis])):
        strides[axis] = inner.get(like.stride(axis), like.stride(axis))
        inner[like.stride(axis) * like.shape[axis]] = strides[axis] * shape[axis]
    return torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)


def _place(guard: Any) -> str:
    """The line of the layer's source that asks about a size; empty for what operations of PyTorch ask."""
    frame = getattr(getattr(guard, "sloc", None), "framework_loc", None)
    file = getattr(frame, "filename", "")
    return f"{Path(file).name}:{frame.lineno}" if file and is_in_layer(file) else ""  # type: ignore[union-attr]


def _is_endless(bound: Any) -> bool:
    return not str(bound).lstrip("-").isdigit() or int(bound) >= 1 << 62
