"""A product with what stands around it in a layer: the norm of x before it, the activation and the residual addition after it.

Layers call these where a body has them in one kernel; elsewhere they call the ops that these are made of.
Suffixes: R rows, I inputs, O outputs, Y outputs after the activation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from infuse.ops.activation import activation as plain_activation
from infuse.ops.activation import gated_activation
from infuse.ops.linear import linear, quantized_linear
from infuse.ops.norm import layer_norm, rms_norm
from infuse.ops.op import Case, op
from infuse.quant.format import quant_format

# Tokens for which blocks fuse norms and sums. Of more the products are PyTorch's, and a norm in one kernel with the addition before it
# is better.
FEW_ROWS = 16
FUSED = ("fused_linear", "fused_quantized_linear")
NO_NORM = (None, None, None, 0.0, 0.0)

_AROUND = "str? norm, Tensor? norm_weight, Tensor? norm_bias, float eps, float offset, str? activation, bool gated, Tensor? residual"


@op(f"fused_linear(Tensor x, Tensor weight, Tensor? bias, {_AROUND}) -> Tensor")
def fused_linear(
    x_RI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    norm: str | None,
    norm_weight_I: Tensor | None,
    norm_bias_I: Tensor | None,
    eps: float,
    offset: float,
    activation: str | None,
    gated: bool,
    residual_RY: Tensor | None,
) -> Tensor:
    """residual + act(norm(x) @ weight.T + bias), each of them where it is not None; float32 inside, x.dtype outside.

    `norm` is "rms" or "layer". With `gated` act(gate) * up, of weights [gate | up].
    """
    x = _normed(_wide(x_RI), norm, norm_weight_I, norm_bias_I, eps, offset)
    y = linear.reference(x, _wide(weight_OI), None if bias_O is None else _wide(bias_O))
    return _finished(y, activation, gated, residual_RY).to(x_RI.dtype)


@op(
    "fused_quantized_linear(Tensor x, Tensor data, Tensor scale, Tensor? zero, Tensor? bias, int outputs, int inputs, str format, "
    f"{_AROUND}) -> Tensor"
)
def fused_quantized_linear(
    x_RI: Tensor,
    data: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias_O: Tensor | None,
    outputs: int,
    inputs: int,
    format: str,
    norm: str | None,
    norm_weight_I: Tensor | None,
    norm_bias_I: Tensor | None,
    eps: float,
    offset: float,
    activation: str | None,
    gated: bool,
    residual_RY: Tensor | None,
) -> Tensor:
    """The same with the quantized weight of `quantized_linear`."""
    x = _normed(_wide(x_RI), norm, norm_weight_I, norm_bias_I, eps, offset)
    y = quantized_linear.reference(x, data, scale, zero, None if bias_O is None else _wide(bias_O), outputs, inputs, format)
    return _finished(y, activation, gated, residual_RY).to(x_RI.dtype)


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype is torch.float64 else t.float()


def _normed(x: Tensor, norm: str | None, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float) -> Tensor:
    if norm is None:
        return x
    return rms_norm.reference(x, weight, eps, offset) if norm == "rms" else layer_norm.reference(x, weight, bias, eps, offset)


def _finished(y: Tensor, activation: str | None, gated: bool, residual: Tensor | None) -> Tensor:
    if activation is not None:
        y = (gated_activation if gated else plain_activation).reference(y, activation)
    return y if residual is None else residual + y


@fused_linear.fake
def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, *around: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // (2 if around[6] else 1))


@fused_quantized_linear.fake
def _quantized_fake(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, outputs: int, inputs: int, format: str, *around: Any
) -> Tensor:
    return x.new_empty(*x.shape[:-1], outputs // (2 if around[6] else 1))


# Rows, inputs, outputs; norm, its weight and bias, offset; activation, gated; bias, residual.
_CASES = (
    ((1,), 64, 96, "rms", True, False, 0.0, "silu", True, False, False),
    ((1,), 128, 33, None, False, False, 0.0, None, False, True, True),
    ((1,), 192, 66, "layer", True, True, 0.0, "silu", True, True, True),
    ((1, 1), 64, 40, "layer", False, False, 0.0, None, False, False, False),
    ((2, 3), 128, 34, "rms", True, False, 1.0, None, False, False, False),
    ((2, 3), 128, 34, "layer", True, True, 1.0, "relu", False, True, True),
    ((3,), 64, 10, None, False, False, 0.0, "silu", True, False, True),
    ((20,), 64, 34, "rms", False, False, 0.0, "silu", True, True, True),
    ((0,), 64, 8, "rms", True, False, 0.0, None, False, False, True),
)


def _arounds(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor, int, int, Tensor | None, tuple]]:
    """A label, x, outputs, inputs, the bias, and the arguments after the weight."""
    for rows, inputs, outputs, norm, weighed, shifted, offset, act, gated, biased, added in _CASES:

        def made(*shape: int, there: bool = True) -> Tensor | None:
            return torch.randn(shape, dtype=dtype, device=device) if there else None

        weight, shift = made(inputs, there=weighed), made(inputs, there=shifted)
        residual = made(*rows, outputs // 2 if gated else outputs, there=added)
        around = (norm, weight, shift, 1e-5, offset, act, gated, residual)
        parts = (norm, "weight" if weighed else "", f"offset {offset:.0f}", act, "gated" if gated else "", "residual" if added else "")
        x = torch.randn(*rows, inputs, dtype=dtype, device=device) * 3 + 1
        label = f"{rows}x{inputs}->{outputs} {' '.join(part for part in parts if part)}"
        yield label, x, outputs, inputs, made(outputs, there=biased), around


@fused_linear.cases
def _cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for label, x, outputs, inputs, bias, around in _arounds(dtype, device):
        yield Case(label, (x, torch.randn(outputs, inputs, dtype=dtype, device=device) / inputs**0.5, bias, *around))


@fused_quantized_linear.cases
def _quantized_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for i, text in enumerate(("int8", "int4:32:asymmetric", "fp8:32", "fp6")):
        for label, x, outputs, inputs, bias, around in list(_arounds(dtype, device))[i % 2 :: 2]:
            held = quant_format(text).quantize(torch.randn(outputs, inputs, device=device) / inputs**0.5)
            yield Case(f"{text} {label}", (x, held.data, held.scale, held.zero, bias, outputs, inputs, text, *around))
