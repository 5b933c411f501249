"""The tests of the Triton bodies: on the CPU through Triton's interpreter (test_triton.py runs this file so), on a GPU compiled
(test_gpu_ops.py).
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from prepared import body_and_args
from test_ops import cases as cases_on_cpu
from test_ops import own, planted, results, written
from tolerance import assert_near
from torch import Tensor

from infuse.ops import Case, registered

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPS = sorted(name for name, op in registered().items() if "triton" in op.bodies)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def there(value: Any) -> Any:
    return value.to(DEVICE) if isinstance(value, Tensor) else value


def cases(name: str, dtype: torch.dtype) -> list[Case]:
    return [Case(case.label, tuple(there(arg) for arg in case.args)) for case in cases_on_cpu(name, dtype)]


def compare(name: str, args: tuple, dtype: torch.dtype, what: str) -> None:
    """The body's results and what it writes are the reference's; what it must not write to is as before."""
    mutated = written(name)
    given = own(args, mutated)
    wanted = results(registered()[name].reference, own(given, []), mutated)
    function, given = body_and_args(name, "triton", given)
    before = own(given, [])
    found = results(function, given, mutated)
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype and a.device == b.device, what
        assert_near(a.cpu(), b.cpu(), dtype, f"{name}, {what}")
    for i, (old, new) in enumerate(zip(before, given, strict=True)):
        if isinstance(old, Tensor) and i not in mutated:
            assert torch.equal(old.float().nan_to_num(), new.float().nan_to_num()), f"{what}: argument {i} was changed"


@by_dtype
@pytest.mark.parametrize("name", OPS)
def test_body_is_the_reference(name: str, dtype: torch.dtype) -> None:
    for case in cases(name, dtype):
        compare(name, case.args, dtype, case.label)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_what_is_not_finite_passes_through_as_in_the_reference(name: str, value: float) -> None:
    for _, case in planted(name, value):
        args = tuple(there(arg) for arg in case.args)
        if name in ("activation", "linear_activation") and "gelu" in case.label:  # as in test_ops.py: PyTorch's in float64 is right
            wanted = registered()[name].reference(*(arg.double() if isinstance(arg, Tensor) else arg for arg in args)).float()
            assert_near(registered()[name].body("triton")(*args).cpu(), wanted.cpu(), torch.float32, case.label)
            continue
        compare(name, args, torch.float32, case.label)
