"""The tests of the Triton bodies: on the CPU through Triton's interpreter (test_triton.py runs this file so), on a GPU compiled
(test_gpu_ops.py).
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from prepared import body_and_args
from test_ops import cases as cases_on_cpu
from test_ops import own, planted, results, written
from tolerance import assert_near
from torch import Tensor

from infuse import ops
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
@pytest.mark.parametrize("name", sorted({*OPS} - {"sample"}))  # scores that are NaN are no distribution
def test_what_is_not_finite_passes_through_as_in_the_reference(name: str, value: float) -> None:
    for _, case in planted(name, value):
        args = tuple(there(arg) for arg in case.args)
        if name in ("activation", "linear_activation") and "gelu" in case.label:  # as in test_ops.py: PyTorch's in float64 is right
            wanted = registered()[name].reference(*(arg.double() if isinstance(arg, Tensor) else arg for arg in args)).float()
            assert_near(registered()[name].body("triton")(*args).cpu(), wanted.cpu(), torch.float32, case.label)
            continue
        compare(name, args, torch.float32, case.label)


@by_dtype
def test_append_at_a_place_in_a_tensor(dtype: torch.dtype) -> None:
    for case in cases("rotary_append", dtype):
        wanted = results(ops.rotary_append.reference, own(case.args, [3, 4]), [3, 4])
        args = own(case.args, [3, 4])
        start = torch.tensor([case.args[5]], device=DEVICE)
        found = results(ops.rotary_append.body("triton"), (*args[:5], start, *args[6:]), [3, 4])
        for a, b in zip(found, wanted, strict=True):
            assert_near(a.cpu(), b.cpu(), dtype, case.label)


def test_nothing_is_written_beyond_the_capacity() -> None:
    qkv, keys, values = (torch.randn(shape, device=DEVICE) for shape in ((1, 3, 4, 16), (1, 1, 8, 16), (1, 1, 8, 16)))
    around = torch.full((3, 1, 1, 8, 16), 7.0, device=DEVICE)
    around[1] = keys
    ops.rotary_append.body("triton")(qkv, None, None, around[1], values, torch.tensor(6, device=DEVICE), 2, False)
    assert bool((around[::2] == 7).all()) and torch.equal(around[1, :, :, 6:].cpu(), qkv[:, :2, 2:3].transpose(1, 2).cpu())
    with pytest.raises(IndexError, match="3 tokens at 6 do not fit a cache of 8"):
        ops.rotary_append.body("triton")(qkv, None, None, keys, values, 6, 2, False)


@by_dtype
def test_attention_over_the_first_keys_of_a_storage(dtype: torch.dtype) -> None:
    for case in cases("attention", dtype):
        length, more = case.args[1].shape[2], 70
        k, v = (F.pad(tensor, (0, 0, 0, more), value=float("nan")) for tensor in case.args[1:3])
        mask, bias = (None if tensor is None else F.pad(tensor, (0, more), value=1) for tensor in case.args[3:5])
        args = (case.args[0], k, v, mask, bias, *case.args[5:])
        found = ops.attention.body("triton")(*args, length=torch.tensor([length], device=DEVICE))
        assert_near(found.cpu(), ops.attention.reference(*case.args).cpu(), dtype, case.label)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_split_over_the_cache(dtype: torch.dtype) -> None:
    """Many keys in several parts, some of them hidden whole; rows of their own lengths through the mask; strided keys."""
    q = torch.randn(2, 6, 2, 33, dtype=dtype, device=DEVICE)
    storage = torch.randn(2, 300, 2, 2, 33, dtype=dtype, device=DEVICE)
    k, v = storage[:, :, :, 0].transpose(1, 2), storage[:, :, :, 1].transpose(1, 2)
    lengths = torch.tensor([300, 70], device=DEVICE)
    mask = (torch.arange(300, device=DEVICE) < lengths[:, None])[:, None, None]
    nothing = mask.clone()
    nothing[1] = False
    bias = torch.randn(1, 6, 1, 300, device=DEVICE)
    for args in (
        (mask, None, 0.2, False, 0, 0.0), (nothing, None, 0.2, False, 0, 0.0), (None, bias, 0.2, True, 0, 0.0),
        (None, None, 0.2, True, 80, 0.0), (mask, bias, 0.2, True, 0, 3.0), (torch.randn(2, 1, 1, 1, device=DEVICE), None, 0.2, True, 0, 0.0),
    ):  # fmt: skip
        wanted = ops.attention.reference(q, k, v, *args)
        assert_near(ops.attention.body("triton")(q, k, v, *args).cpu(), wanted.cpu(), dtype)


@by_dtype
def test_attention_of_many_queries(dtype: torch.dtype) -> None:
    """Several tiles of rows, which begin and end inside a query's heads; the caps and biases that PyTorch's has not."""
    q = torch.randn(1, 3, 50, 16, dtype=dtype, device=DEVICE)
    k, v = (torch.randn(1, 1, 61, 16, dtype=dtype, device=DEVICE) for _ in range(2))
    bias = torch.randn(1, 3, 1, 61, dtype=dtype, device=DEVICE)
    for args in ((None, None, 0.25, True, 0, 5.0), (None, bias, 0.25, True, 0, 0.0), (None, None, 0.25, True, 9, 0.0)):
        wanted = ops.attention.reference(q, k, v, *args)
        assert_near(ops.attention.body("triton")(q, k, v, *args).cpu(), wanted.cpu(), dtype)


@by_dtype
def test_a_draw_from_several_blocks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infuse.ops.triton.sampling.SAMPLED_BLOCK", 128)
    logits = (torch.randn(2, 400, device=DEVICE) * 4).to(dtype)[:, :300]
    for settings in ((0.9, 20, 0.5), (1.0, 0, 1.0), (1.5, 0, 0.9)):
        compare("sample", (logits, torch.rand(2, device=DEVICE), *settings), dtype, f"{settings}")


def test_a_draw_at_the_ends() -> None:
    """Uniform 0 takes the first that is kept; just below 1 the last, although rounding may leave nothing above the target."""
    logits = torch.tensor([[-9.0, 1.0, 3.0, 2.0, -9.0]] * 2, device=DEVICE)
    uniform = torch.tensor([0.0, 1.0 - 2**-24], device=DEVICE)
    assert ops.sample.body("triton")(logits, uniform, 1.0, 3, 1.0).tolist() == [1, 3]


def test_argmax_over_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infuse.ops.triton.sampling.ARGMAX_SHARE", 128)
    logits = torch.randint(20, (3, 700), device=DEVICE).float() - 30
    logits[1, [300, 600]], logits[2, 5] = float("nan"), 0.0
    logits[2, 4] = -0.0
    assert ops.argmax.body("triton")(logits).tolist() == [int((logits[0] == logits[0].max()).nonzero()[0]), 300, 4]
    assert ops.argmax.body("triton")(torch.full((1, 300), float("-inf"), device=DEVICE)).tolist() == [0]
