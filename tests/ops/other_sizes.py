"""Arguments of recurrent mixers' ops in sizes that do not fit each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from infuse.ops import Case, registered
from tests.support.op_cases import results
from tests.support.tolerance import assert_near

RECURRENT = ("causal_conv", "decay", "linear_attention", "gated_norm", "selective_scan")
REFUSALS = (RuntimeError, ValueError)


def assert_other_sizes_are_those_of_the_reference(
    name: str, function: Callable[..., Any], cases: Iterable[Case]
) -> None:
    """What the reference refuses, a body refuses, too; else it refuses it or has the same results."""
    reference, refused = registered()[name].reference, 0
    for case in cases:
        if not case.args[0].numel() or case.args[0].shape[1] > 10:
            continue
        for what, args in _of_other_sizes(case.args):
            try:
                wanted = results(reference, args, [])
            except REFUSALS:
                refused += 1
                with pytest.raises(REFUSALS):
                    function(*args)
                continue
            try:
                found = results(function, args, [])
            except REFUSALS:
                continue
            for a, b in zip(found, wanted, strict=True):
                assert_near(a.cpu(), b.cpu(), torch.float32, f"{name}, {case.label}, {what}")
    assert refused > 20


def _of_other_sizes(args: tuple) -> Iterator[tuple[str, tuple]]:
    """The arguments with one axis of one tensor shorter, longer or of one element."""
    for i, tensor in enumerate(args):
        for axis in range(tensor.dim()) if isinstance(tensor, Tensor) else ():
            size = tensor.shape[axis]
            for other in sorted({0, 1, size // 2, size - 1, 2 * size} - {size}):
                resized = tensor.repeat_interleave(2, axis) if other > size else tensor.narrow(axis, 0, other)
                yield f"argument {i}: {tuple(resized.shape)}", (*args[:i], resized.contiguous(), *args[i + 1 :])
