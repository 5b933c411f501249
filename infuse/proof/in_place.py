"""Prove a linear inside the module that calls it, because a caller may read more of a linear than its output.

The caller runs twice: once with the new linear in place of the original, and once with the original using the new one's
forward. Both must give the same result, whatever rounding the new linear adds. The caller runs in the model's own
dtype, as recorded.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from infuse.architectures.model_inputs import SEED
from infuse.errors import in_brief
from infuse.proof.callers import Caller
from infuse.proof.compare import STRUCTURE_TOLERANCE, distance
from infuse.proof.shortened import shortened


def in_place_mismatch(caller: Caller, new: nn.Module) -> str | None:
    """Return why `caller` behaves differently with `new` than with the current linear; None if it does not."""
    where, _, name = caller.path.rpartition(".")
    holder = caller.module.get_submodule(where)
    old = holder._modules[name]
    assert old is not None
    own = vars(old).get("forward")
    try:
        old.forward = new.forward  # type: ignore[method-assign]
        wanted = _tensors(_run(caller))
    finally:
        del old.forward
        if own is not None:
            old.forward = own  # type: ignore[method-assign]
    holder._modules[name] = new
    try:
        found = _tensors(_run(caller))
    except Exception as error:  # it reads an attribute that the new linear lacks
        return f"{type(caller.module).__name__} around it fails with the new linear: {in_brief(error)}"
    finally:
        holder._modules[name] = old
    if len(found) == len(wanted) and all(_same(a, b) for a, b in zip(found, wanted, strict=True)):
        return None
    return f"{type(caller.module).__name__} around it reads more of it than what it returns, and gives other values"


def _run(caller: Caller) -> Any:
    args, kwargs = copy.deepcopy((caller.args, caller.kwargs))
    short = shortened(caller.module, ()) if caller.short else nullcontext()
    with short, torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return caller.module(*args, **kwargs)


def _tensors(value: Any) -> list[Tensor]:
    """The tensors of an output in order, except those in caches."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def _same(found: Tensor, wanted: Tensor) -> bool:
    """True if two results are equal up to summation order."""
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return False
    if not found.is_floating_point():
        return torch.equal(found, wanted)
    if torch.allclose(found, wanted, equal_nan=True):
        return True
    return distance(found, wanted.float()) <= max(STRUCTURE_TOLERANCE, torch.finfo(found.dtype).eps)
