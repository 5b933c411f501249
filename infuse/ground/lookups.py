"""Check indices before a GPU looks them up.

On a CPU an index out of range is an error of one call. On a GPU the kernel asserts, and from then on every call of the
process fails. A model that is run on calls which it may not support must therefore be asked with checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from infuse.ground.modes import Transparent

_ALONG = ("index_select", "index_copy", "index_copy_", "index_add", "index_add_", "index_fill", "index_fill_", "gather",
          "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_")  # fmt: skip
_FROM_BOTH_ENDS = ("index", "index_put", "index_put_", "_index_put_impl_")  # negative indices count from the end


def lookups_in_range(device: torch.device) -> AbstractContextManager[Any]:
    """Context in which a lookup out of range on a GPU raises IndexError and leaves the device usable.

    Every lookup waits for the device. On CPUs, which raise by themselves, it does nothing.
    """
    return nullcontext() if device.type == "cpu" else CheckedLookups()


class CheckedLookups(Transparent, TorchDispatchMode):
    """Raises IndexError for indices of ATen's lookups that are out of range, whatever their device."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let models compile what they compile, unchecked inside: without this their compiled functions would fail."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.OpOverload) and func.namespace == "aten":
            for index, size, least in _lookups(func._schema.name.removeprefix("aten::"), args):
                _check(index, size, least)
        return func(*args, **(kwargs or {}))


def _lookups(name: str, args: tuple) -> Iterator[tuple[Any, int, int]]:
    """Yield the indices that an operation looks up, the number of entries there are, and the smallest index."""
    if name == "embedding" and len(args) > 1:
        yield args[1], args[0].shape[0], 0
    elif name in _FROM_BOTH_ENDS and len(args) > 1:
        dim = 0
        for index in args[1]:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                dim += index.dim()  # a mask
                continue
            if index is not None:
                yield index, args[0].shape[dim], -args[0].shape[dim]
            dim += 1
    elif name in _ALONG and len(args) > 2 and args[0].dim():
        yield args[2], args[0].shape[args[1]], 0


def _check(index: Any, size: int, least: int) -> None:
    if type(index) is not Tensor or index.is_meta or index.is_floating_point() or not index.numel():
        return
    low, high = (int(end) for end in torch.aminmax(index))
    if low < least or high >= size:
        wrong = high if high >= size else low
        raise IndexError(f"index {wrong} is out of range for {size} entries")
