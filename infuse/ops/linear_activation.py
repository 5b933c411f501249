"""The first half of a feed-forward part in one pass: the product and its activation, plain or gated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from infuse.ops.activation import activation, gated_activation
from infuse.ops.linear import linear, quantized_linear
from infuse.ops.op import Case, op
from infuse.quant.parse import quant_format


@op("linear_activation(Tensor x, Tensor weight, Tensor? bias, str name, bool gated) -> Tensor")
def linear_activation(x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, name: str, gated: bool) -> Tensor:
    """The activation `name` of x @ weight.T + bias, [R, O]; where gated act(gate) * up, [R, O / 2], for weights [gate |
    up].
    """
    act = gated_activation if gated else activation
    return act.reference(linear.reference(x_RI, weight_OI, bias_O), name)


@op(
    "quantized_linear_activation(Tensor x, Tensor data, Tensor scale, Tensor? zero, Tensor? bias, int outputs, int inputs, str format,"
    " str name, bool gated) -> Tensor"
)
def quantized_linear_activation(x_RI: Tensor, *given: Any) -> Tensor:
    """The same with the weight of `quantized_linear`: `given` is what that takes after x, then name and gated."""
    *weight, name, gated = given
    act = gated_activation if gated else activation
    return act.reference(quantized_linear.reference(x_RI, *weight), name)


@linear_activation.fake
def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, name: str, gated: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // (2 if gated else 1))


@quantized_linear_activation.fake
def _quantized_fake(x: Tensor, *given: Any) -> Tensor:
    outputs, gated = given[4], given[-1]
    return x.new_empty(*x.shape[:-1], outputs // (2 if gated else 1))


_SHAPES = (((1,), 64, 96), ((2, 9), 128, 34), ((0,), 64, 8), ((3, 20), 192, 2))


@linear_activation.cases
def _cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for rows, inputs, outputs in _SHAPES:
        x = torch.randn(*rows, inputs, dtype=dtype, device=device)
        weight = torch.randn(outputs, inputs, dtype=dtype, device=device) / inputs**0.5
        for name, gated in (("gelu", False), ("silu", True), ("relu2", False)):
            yield Case(f"{name} {rows}x{inputs}->{outputs}", (x, weight, None, name, gated))
            bias = torch.randn(outputs, dtype=dtype, device=device)
            yield Case(f"{name} {rows}x{inputs}->{outputs} bias", (x, weight, bias, name, gated))


@quantized_linear_activation.cases
def _quantized_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for text in ("int8", "int4:32:asymmetric", "fp8", "fp6"):
        for rows, inputs, outputs in (*_SHAPES[:3], ((3, 20), 64, 96)):
            held = quant_format(text).quantize(torch.randn(outputs, inputs, device=device) / inputs**0.5)
            x = torch.randn(*rows, inputs, dtype=dtype, device=device)
            bias = torch.randn(outputs, dtype=dtype, device=device)
            for name, gated in (("gelu", False), ("silu", True)):
                args = (x, held.data, held.scale, held.zero, bias, outputs, inputs, text, name, gated)
                yield Case(f"{text} {name} {rows}x{inputs}->{outputs}", args)
