"""torch.autocast around replaced layers, which compute in the dtype of their weights and return the original's dtype.

On GPUs autocast acts on plain matrices inside of layers, as it does in the original.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from infuse.ground.errors import UnsupportedCall

# Asked in each call of a layer: the public functions want the name of a device, which takes several times as long.
is_any_on = torch._C._is_any_autocast_enabled


def dtype_for(x: Tensor) -> torch.dtype | None:
    """The dtype in which autocast runs products of x; None if it does not."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def is_left_out(module: nn.Module, x: Tensor) -> bool:
    """Whether a layer called with x is to run `without` the autocast that is on around it.

    UnsupportedCall if autocast has another 16-bit dtype than the layer.
    """
    dtype, own = dtype_for(x), _dtype_of(module)
    if dtype is None:
        return False
    if any(each not in (None, torch.float32, dtype) for each in (own, x.dtype)):
        raise UnsupportedCall(
            f"torch.autocast in {dtype} around {type(module).__name__}, which was replaced in {own or x.dtype}: leave "
            f"autocast out, or give it dtype={own or x.dtype}"
        )
    return x.device.type == "cpu" or own is None


def without(forward: Callable[..., Any], module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call forward(module, x, ...) outside of autocast; the result has the dtype of x."""
    own = _dtype_of(module)
    given = x if own is None else x.to(own)
    with torch.autocast(x.device.type, enabled=False):
        result = forward(module, given, *args, **kwargs)
    if given.dtype == x.dtype:
        return result
    return (result[0].to(x.dtype), *result[1:]) if isinstance(result, tuple) else result.to(x.dtype)


def _dtype_of(module: nn.Module) -> torch.dtype | None:
    """The dtype of the module's plain matrices; None if all are quantized."""
    return next((each.dtype for each in module.parameters() if each.dim() > 1 and each.is_floating_point()), None)
