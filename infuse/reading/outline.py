"""The outline of a model: a copy of its modules in which every tensor is on meta, without hooks.

Its layers can be run and traced without reading a weight and without a trace in the user's model.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn


def outline(model: nn.Module, dtype: torch.dtype, exact: Collection[str] = ()) -> nn.Module:
    """Copy `model` onto meta, with parameters in `dtype`; those named in `exact` and all buffers keep their dtype.

    Raises whatever an object that cannot be copied raises.
    """
    memo: dict[int, Any] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        kept = name in exact or not isinstance(tensor, nn.Parameter) or not tensor.is_floating_point()
        empty = torch.empty(tensor.shape, dtype=tensor.dtype if kept else dtype, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor):  # a plain attribute
                memo.setdefault(id(value), torch.empty_like(value, device="meta"))
    copied: nn.Module = copy.deepcopy(model, memo)
    for module in copied.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            hooks.clear()
        vars(module).pop("forward", None)  # set on the instance, by accelerate for one
    return copied.eval()
