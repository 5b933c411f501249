"""Run a module in another dtype for a while: its weights are cast as they are needed, in parts, so that memory hardly grows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_PARTS = 16  # a merged 16-bit matrix beside such a part of itself in float32 is less than the layer that it belongs to
_PART_VALUES = 1 << 20  # 4 MiB in float32: memory that an allocator keeps, where larger parts are paid in page faults each time


@contextmanager
def in_dtype(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Run `module` in `dtype` for a while. Linears are cast in parts as they run, so that memory hardly grows."""
    if type(module) is nn.Embedding:  # what is looked up is exact in any dtype that is wide enough
        yield
        return
    kept = {p: p.data for p in module.parameters() if p.is_floating_point() and p.dtype != dtype}
    handles, linears = [], []

    def cast(owner: nn.Module, args: Any) -> None:
        for p in owner.parameters(recurse=False):
            if p in kept:
                p.data = kept[p].to(dtype)

    def restore(owner: nn.Module, args: Any, output: Any) -> None:
        for p in owner.parameters(recurse=False):
            if p in kept:
                p.data = kept[p]

    for child in module.modules():
        if not any(p in kept and p.dim() > 1 for p in child.parameters(recurse=False)):
            continue
        if isinstance(child, nn.Linear):
            linears.append((child, vars(child).get("forward")))
            child.forward = partial(_in_parts, child, dtype)  # type: ignore[method-assign]
        else:
            handles += [child.register_forward_pre_hook(cast), child.register_forward_hook(restore)]
    try:
        for p, data in kept.items():
            if p.dim() < 2:
                p.data = data.to(dtype)
        yield
    finally:
        for handle in handles:
            handle.remove()
        for child, forward in linears:
            del child.forward
            if forward is not None:
                child.forward = forward  # type: ignore[method-assign]
        for p, data in kept.items():
            p.data = data


def _in_parts(linear: nn.Linear, dtype: torch.dtype, x: Tensor) -> Tensor:
    """linear(x) with a weight in `dtype` of which only a part exists at a time."""
    rows = max(1, min(-(-linear.out_features // _PARTS), _PART_VALUES // max(linear.in_features, 1)))
    x = x.to(dtype)  # T5 casts it to the dtype that the weight is held in
    out = torch.cat([F.linear(x, part.to(dtype)) for part in linear.weight.split(rows)], dim=-1)
    out = out if linear.bias is None else out + linear.bias
    combine = vars(linear).get("_combine")  # of a rank's part: with the other ranks' it makes what the whole gives
    return out if combine is None else combine(out)
