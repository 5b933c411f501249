"""Assignments under a mask inside a graph: `x[mask] = value`, as in T5Gemma 2's embedding, for one token.

PyTorch asks the device how many places the mask has, which cannot be captured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from infuse.ground.modes import Transparent


class MaskedAssignments(Transparent, TorchFunctionMode):
    """Context in which an assignment of one value under a mask selects the old or the new value in each place."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if function is Tensor.__setitem__ and (chosen := _chosen(*args)) is not None:
            args[0].copy_(chosen)
            return None
        return function(*args, **(kwargs or {}))


def _chosen(x: Tensor, mask: Any, value: Any) -> Tensor | None:
    """What x becomes; None if the mask or the value is another index or has a row for each place."""
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or mask.shape != x.shape[: mask.dim()]:
        return None
    each = x.dim() - mask.dim()  # axes of a place
    if not isinstance(value, (int, float)) and not (isinstance(value, Tensor) and value.dim() <= each):
        return None
    return torch.where(mask.view(*mask.shape, *(1,) * each), value, x)
