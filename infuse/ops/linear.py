"""The matrix product with a plain weight, and with a quantized one.

Suffixes: R rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from infuse.ops.op import Case, op
from infuse.quant.format import QuantizedWeight
from infuse.quant.parse import quant_format


@op("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
def linear(x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """x @ weight.T + bias."""
    return F.linear(x_RI, weight_OI, bias_O)


@op(
    "quantized_linear(Tensor x, Tensor data, Tensor scale, Tensor? zero, Tensor? bias, int outputs, int inputs, str format) -> Tensor"
)
def quantized_linear(
    x_RI: Tensor,
    data: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias_O: Tensor | None,
    outputs: int,
    inputs: int,
    format: str,
) -> Tensor:
    """x @ dequantize(weight).T + bias, where data, scale and zero are the buffers of a QuantizedWeight of `format`."""
    chosen = quant_format(format)
    weight_OI = chosen.dequantize(QuantizedWeight(data, scale, zero, (outputs, inputs), chosen), x_RI.dtype)
    return F.linear(x_RI, weight_OI, bias_O)


@linear.fake
def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@quantized_linear.fake
def _quantized_fake(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    outputs: int,
    inputs: int,
    format: str,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], outputs)


_SHAPES = (((1,), 64, 96), ((2, 3), 128, 33), ((0,), 64, 8), ((7,), 192, 1))


@linear.cases
def _cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for rows, inputs, outputs in _SHAPES:
        x = torch.randn(*rows, inputs, dtype=dtype, device=device)
        weight = torch.randn(outputs, inputs, dtype=dtype, device=device) / inputs**0.5
        yield Case(f"{rows}x{inputs}->{outputs}", (x, weight, None))
        yield Case(f"{rows}x{inputs}->{outputs} bias", (x, weight, torch.randn(outputs, dtype=dtype, device=device)))


@quantized_linear.cases
def _quantized_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for text in ("int8", "int8:64:asymmetric", "int4", "int4:32:asymmetric", "fp8", "fp8:32", "fp6", "fp6:row"):
        for rows, inputs, outputs in _SHAPES:
            weight = torch.randn(outputs, inputs, device=device) / inputs**0.5
            held = quant_format(text).quantize(weight)
            x = torch.randn(*rows, inputs, dtype=dtype, device=device)
            bias = torch.randn(outputs, dtype=dtype, device=device)
            yield Case(
                f"{text} {rows}x{inputs}->{outputs}", (x, held.data, held.scale, held.zero, bias, outputs, inputs, text)
            )
