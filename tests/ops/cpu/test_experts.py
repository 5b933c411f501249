"""A mixture's experts in C++ (ops/cpu/src/binding_experts.cpp): every way to multiply, threads and instruction sets.

Few tokens and all options are among the op's cases in ops/test_ops.py. Run as a program, it prints the instruction set
and runs the cases, for tests that force a lower one.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from infuse import ops
from infuse.native import DTYPES, isa, kernels
from infuse.quant.parse import quant_format
from tests.support.prepared import runner
from tests.support.tolerance import assert_near

pytestmark = pytest.mark.skipif(isinstance(kernels(), str), reason=str(kernels()))

# Tokens, routes, experts, hidden, inner, gated. With 150 tokens some experts stream and others multiply tiles; with
# widths of 40 and 24 experts begin inside a panel.
SHAPES = (
    (150, 2, 5, 64, 96, True),
    (150, 2, 3, 40, 24, True),
    (64, 1, 1, 128, 40, False),
    (9, 3, 4, 40, 72, True),
    (1, 5, 6, 64, 40, True),
    (1300, 1, 1, 1024, 32, True),  # more than a core's cache holds
)
FORMATS = ("mxfp4", "int8:8", "int4:8", "fp8:row", "int8:8:asymmetric", "int4:8:asymmetric:f16")
REAL = runner("experts", "cpu")
CODES = runner("quantized_experts", "cpu")


def routed(tokens: int, routes: int, experts: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, an index that prefers low experts and repeats and leaves some out, and weights."""
    index = (torch.rand(tokens, routes) ** 3 * (experts + 1)).long() - 1  # -1: another rank's
    return torch.randn(tokens, width).to(dtype), index, torch.rand(tokens, routes)


def matrices(experts: int, width: int, inner: int, gated: bool) -> tuple[Tensor, Tensor]:
    up = torch.randn(experts * inner * (2 if gated else 1), width) / width**0.5
    return up, torch.randn(experts * width, inner) / inner**0.5


def quantized(text: str, up: Tensor, down: Tensor) -> tuple:
    """The arguments of both weights without biases, the inner width and the formats."""
    a, b = quant_format(text).quantize(up), quant_format(text).quantize(down)
    return ([*a.tensors.values()], None, [*b.tensors.values()], None, down.shape[1], text, text)


def poison(x: Tensor) -> None:
    """Fill the memory that a result like `x` is likely to get."""
    torch.full_like(x, float("nan"))


def check(dtype: torch.dtype, shape: tuple) -> None:
    tokens, routes, experts, width, inner, gated = shape
    given, (up, down) = routed(tokens, routes, experts, width, dtype), matrices(experts, width, inner, gated)
    wide, gate = (given[0].float(), *given[1:]), ("silu" if gated else "gelu", gated)
    up, down = up.to(dtype), down.to(dtype)
    poison(given[0])
    found = REAL(*given, up, None, down, None, *gate)
    assert_near(found, ops.experts(*wide, up.float(), None, down.float(), None, *gate), dtype, f"{shape} {dtype}")
    for text in FORMATS:
        if any(quant_format(text).fits(inputs) for inputs in (width, inner)):
            continue
        held = quantized(text, up.float(), down.float())
        poison(given[0])
        found = CODES(*given, *held, *gate)
        assert_near(found, ops.quantized_experts(*wide, *held, *gate), dtype, f"{text} {shape} {dtype}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_the_reference(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        check(dtype, shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("text", ["int8", "int4:a8", ""])
def test_threads_and_chunks_change_no_bit(dtype: torch.dtype, text: str) -> None:
    given = routed(90, 2, 4, 256, dtype)
    up, down = matrices(4, 256, 512, True)
    run = CODES if text else REAL
    held = quantized(text, up, down) if text else (up.to(dtype), None, down.to(dtype), None)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results += [run(*given, *held, "silu"), run(*(g[:3] for g in given), *held, "silu")]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for i in (0, 1) for a, b in zip(results[i::2], results[i + 2 :: 2], strict=False))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("text", ["int8:32:a8", "int4:32:asymmetric:a8"])
def test_rounded_activations_are_near_and_what_is_not_finite_stays_in_its_token(dtype: torch.dtype, text: str) -> None:
    given, (up, down) = routed(60, 2, 2, 96, dtype), matrices(2, 96, 64, True)
    held = quantized(text, up, down)
    wide = (given[0].float(), *given[1:])
    found, wanted = CODES(*given, *held, "silu").double(), ops.quantized_experts(*wide, *held, "silu").double()
    assert float((found - wanted).norm() / wanted.norm()) < 0.03
    given[1][7, 0] = 0
    given[0][7, 5] = float("inf")
    found = CODES(*given, *held, "silu")
    assert not torch.isfinite(found[7]).any() and torch.isfinite(found[8:]).all() and torch.isfinite(found[:7]).all()


def test_no_token_and_no_route() -> None:
    up, down = matrices(2, 64, 32, True)
    for index in (torch.empty(0, 2, dtype=torch.int64), torch.tensor([[5, -1], [2, 9]])):
        x = torch.randn(len(index), 64)
        poison(x)
        found = REAL(x, index, torch.rand(index.shape), up, None, down, None, "silu")
        assert torch.equal(found, torch.zeros_like(x))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(isa())
    for each in DTYPES:
        for sizes in SHAPES:
            check(each, sizes)
