"""The first half of a feed-forward part in one pass: the product and its activation, plain or gated."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from infuse.ops.activation import activation, gated_activation
from infuse.ops.linear import linear
from infuse.ops.op import Case, op


@op("linear_activation(Tensor x, Tensor weight, Tensor? bias, str name, bool gated) -> Tensor")
def linear_activation(x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, name: str, gated: bool) -> Tensor:
    """The activation `name` of x @ weight.T + bias, [R, O]; where gated act(gate) * up, [R, O / 2], for weights [gate | up]."""
    act = gated_activation if gated else activation
    return act.reference(linear.reference(x_RI, weight_OI, bias_O), name)


@linear_activation.fake
def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, name: str, gated: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // (2 if gated else 1))


@linear_activation.cases
def _cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for rows, inputs, outputs in (((1,), 64, 96), ((2, 9), 128, 34), ((0,), 64, 8), ((3, 20), 192, 2)):
        x = torch.randn(*rows, inputs, dtype=dtype, device=device)
        weight = torch.randn(outputs, inputs, dtype=dtype, device=device) / inputs**0.5
        for name, gated in (("gelu", False), ("silu", True), ("relu2", False)):
            yield Case(f"{name} {rows}x{inputs}->{outputs}", (x, weight, None, name, gated))
            bias = torch.randn(outputs, dtype=dtype, device=device)
            yield Case(f"{name} {rows}x{inputs}->{outputs} bias", (x, weight, bias, name, gated))
