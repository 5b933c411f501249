"""Matrix products in C++ against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from infuse import ops
from infuse.native import kernels
from infuse.quant.parse import quant_format
from tests.support.prepared import runner
from tests.support.tolerance import OF_LARGEST, assert_near

ROWS = (0, 1, 2, 3, 5, 8, 9, 17)
QUANTIZED_ROWS = (*ROWS, 12, 73)  # the last by tiles
plain = ops.linear.body("cpu")
quantized = runner("quantized_linear", "cpu")


def activated(*args: Any) -> Tensor:
    """The quantized product, then the last two arguments: the name of the activation, and whether it is gated."""
    *given, name, gated = args
    return quantized(*given, *ops.NO_NORM, name, gated, None)


def poison(*shape: int, dtype: torch.dtype) -> None:
    """Leave NaN in the memory that the next tensor of this size is likely to get."""
    torch.full(shape, float("nan"), dtype=dtype)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


def assert_product(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, what: str) -> None:
    """Like assert_near; a result that is small because products cancel is measured in units of their random sum."""
    wanted = exact(x, weight, bias)
    assert found.dtype == x.dtype and found.shape == wanted.shape, what
    if wanted.numel():
        size = max(float(wanted.abs().max()), float((x.double() ** 2 @ weight.double().T ** 2).max()) ** 0.5)
        error = float((found.double() - wanted).abs().max())
        assert error <= OF_LARGEST[x.dtype] * size, f"{what}: off by {error:.2e} at results of {size:.2e}"


def assert_activated(found: Tensor, wanted: Tensor, dtype: torch.dtype, what: str) -> None:
    """Like assert_near, for results around 1: single ones may be small because products or activations cancel."""
    one = torch.ones(1, dtype=torch.float64)
    assert found.shape == wanted.shape, what
    assert_near(torch.cat((found.double().flatten(), one)), torch.cat((wanted.flatten(), one)), dtype, what)


def quantized_args(text: str, inputs: int, outputs: int) -> tuple[list[Tensor], Tensor]:
    """The buffers as the op takes them (but for x and bias), and the weight's exact values."""
    held = quant_format(text).quantize(torch.randn(outputs, inputs))
    return [*held.tensors.values()], quant_format(text).dequantize(held)


def check_plain(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    for rows in ROWS:
        x = torch.randn(rows, inputs).to(dtype)
        for b in (None, bias):
            poison(rows, outputs, dtype=dtype)
            assert_product(plain(x, weight, b), x, weight, b, f"body, {rows}x{inputs}->{outputs} {dtype}")
            poison(rows, outputs, dtype=dtype)
            # The kernel itself too: the body leaves small weights and many rows to PyTorch.
            assert_product(kernels().linear(x, weight, b), x, weight, b, f"{rows}x{inputs}->{outputs} {dtype}")


def check_quantized(dtype: torch.dtype, text: str, inputs: int, outputs: int) -> None:
    buffers, weight = quantized_args(text, inputs, outputs)
    bias = torch.randn(outputs).to(dtype)
    for rows in QUANTIZED_ROWS:
        x = torch.randn(rows, inputs).to(dtype)
        for b in (None, bias):
            poison(rows, outputs, dtype=dtype)
            assert_product(
                quantized(x, buffers, b, outputs, inputs, text),
                x,
                weight,
                b,
                f"{text} {rows}x{inputs}->{outputs} {dtype}",
            )


def check_sizes(dtype: torch.dtype, text: str) -> None:
    """x of which groups differ in size, some are zero, and single elements are far larger than their neighbours."""
    inputs, outputs = 384, 20
    buffers, weight = quantized_args(text, inputs, outputs)
    smallest = 1e-36 if torch.finfo(dtype).max > 1e38 else 2e-6
    for rows in (1, 2, 5, 8):
        x = torch.randn(rows, inputs)
        sizes = (1e-3, 30.0, smallest, 1.0, 0.0, 7.0)
        apart = (x.view(rows, 6, 64) * torch.tensor(sizes)[:, None]).view(rows, inputs)
        peaked = x.clone()
        peaked[:, ::32] *= 300
        for given in (x * smallest, apart, peaked, torch.zeros(rows, inputs)):
            given = given.to(dtype)
            poison(rows, outputs, dtype=dtype)
            what = f"{text} {rows} rows {dtype}, up to {float(given.abs().max()):.0e}"
            assert_product(quantized(given, buffers, None, outputs, inputs, text), given, weight, None, what)


def check_activated(text: str, inputs: int, outputs: int) -> None:
    """Rows enough for tiles; in bfloat16, since nothing else goes by tiles."""
    buffers, weight = quantized_args(text, inputs, outputs)
    x, bias = (
        (torch.randn(50, inputs) / inputs**0.5).bfloat16(),
        torch.randn(outputs).bfloat16(),
    )  # small: activations differ there
    for b in (None, bias):
        wanted = exact(x, weight.bfloat16(), b)
        for name, gated in (("gelu", False), ("silu", True)):
            poison(50, outputs // 2 if gated else outputs, dtype=torch.bfloat16)
            found = activated(x, buffers, b, outputs, inputs, text, name, gated)
            act = ops.gated_activation if gated else ops.activation
            assert_near(found, act(wanted, name), torch.bfloat16, f"{text} {name} {inputs}->{outputs}")


def check_tiled(dtype: torch.dtype, rows: int, inputs: int) -> None:
    for outputs in (1, 2, 16, 17, 32, 34, 100):
        x, weight = torch.randn(rows, inputs).to(dtype), (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
        for bias in (None, torch.randn(outputs).to(dtype)):
            wanted = exact(x, weight, bias)
            poison(rows, outputs, dtype=dtype)
            if (found := kernels().tiled_linear(x, weight, bias, -1, False)) is None:
                pytest.skip("PyTorch's product is taken here")
            assert_product(found, x, weight, bias, f"{rows}x{inputs}->{outputs}")
            for number, name in enumerate(("silu", "gelu")):
                poison(rows, outputs, dtype=dtype)
                found = kernels().tiled_linear(x, weight, bias, number, False)
                assert_activated(found, ops.activation(wanted, name), dtype, f"{name} {rows}x{inputs}->{outputs}")
                if outputs % 2 == 0:
                    poison(rows, outputs // 2, dtype=dtype)
                    found = kernels().tiled_linear(x, weight, bias, number, True)
                    wanted_gated = ops.gated_activation(wanted, name)
                    assert_activated(found, wanted_gated, dtype, f"gated {rows}x{inputs}->{outputs}")
