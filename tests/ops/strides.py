"""Arguments of ops copied with their strides: slices stay slices, and what lies between their rows is NaN."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from infuse.ops import Case
from tests.support import op_cases


def own(args: tuple, poisoned: list[int]) -> tuple:
    """op_cases.own with the strides of `args`."""
    return _as_in(args, op_cases.own(args, poisoned))


def planted(name: str, value: float) -> Iterator[tuple[int, Case]]:
    """op_cases.planted with the strides of the cases."""
    of_label = {case.label: case.args for case in op_cases.cases(name, torch.float32)}
    for i, case in op_cases.planted(name, value):
        yield i, replace(case, args=_as_in(of_label[case.label], case.args))


def _as_in(args: tuple, copies: tuple) -> tuple:
    """The copies with the strides and offsets of `args`."""
    leaves, spec = tree_flatten(copies)
    laid = (_laid_as(a, b) if isinstance(b, Tensor) else b for a, b in zip(tree_leaves(args), leaves, strict=True))
    return tree_unflatten(laid, spec)


def _laid_as(like: Tensor, copy: Tensor) -> Tensor:
    if copy.stride() == like.stride() or 0 in like.stride():  # what is expanded cannot be written to
        return copy
    end = like.storage_offset() + 1 + sum((n - 1) * step for n, step in zip(like.shape, like.stride(), strict=True))
    unused: Any = float("nan") if copy.is_floating_point() else 77
    storage = copy.new_full((max(end, 0),), unused)
    return storage.as_strided(like.shape, like.stride(), like.storage_offset()).copy_(copy)
