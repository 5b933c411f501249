"""A product with what stands around it in a layer: the norm of x before it, the activation and the residual addition
after it.

Layers call these where a body has them in one kernel; elsewhere they call the ops that these are made of.
Suffixes: R rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infuse.ops.activation import activation, gated_activation
from infuse.ops.linear import linear, quantized_linear
from infuse.ops.norm import layer_norm, rms_norm
from infuse.ops.op import REFERENCE, Case, op
from infuse.quant.parse import quant_format

# Tokens for which blocks fuse norms and sums. Of more the products are PyTorch's, and a norm in one kernel with the
# addition before it is better.
FEW_ROWS = 16
FUSED = ("fused_linear", "fused_quantized_linear")
NO_NORM = (None, None, None, 0.0, 0.0)


class Around(NamedTuple):
    """What stands around a product: the arguments of these ops after the weight.

    `norm` is "rms" or "layer", with weight and bias over the inputs; the residual has the outputs of the product, of
    which `gated` makes act(gate) * up, of weights [gate | up].
    """

    norm: str | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    eps: float
    offset: float
    activation: str | None
    gated: bool
    residual: Tensor | None

    def outputs(self, rows_of_weight: int) -> int:
        return rows_of_weight // 2 if self.gated else rows_of_weight


_AROUND = "str? norm, Tensor? norm_weight, Tensor? norm_bias, float eps, float offset, str? activation, bool gated, Tensor? residual"


@op(f"fused_linear(Tensor x, Tensor weight, Tensor? bias, {_AROUND}) -> Tensor")
def fused_linear(x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, *given: Any) -> Tensor:
    """residual + act(norm(x) @ weight.T + bias), each of them where it is not None; float32 inside, x.dtype outside.
    `given`: Around.
    """
    around = Around(*given)
    y = linear.reference(_normed(_wide(x_RI), around), _wide(weight_OI), None if bias_O is None else _wide(bias_O))
    return _finished(y, around).to(x_RI.dtype)


@op(
    "fused_quantized_linear(Tensor x, Tensor data, Tensor scale, Tensor? zero, Tensor? bias, int outputs, int inputs, str format, "
    f"{_AROUND}) -> Tensor"
)
def fused_quantized_linear(x_RI: Tensor, *given: Any) -> Tensor:
    """The same with the quantized weight of `quantized_linear`: `given` is what that takes after x, then Around."""
    (*weight, bias_O, outputs, inputs, format), around = given[:7], Around(*given[7:])
    bias_O = None if bias_O is None else _wide(bias_O)
    y = quantized_linear.reference(_normed(_wide(x_RI), around), *weight, bias_O, outputs, inputs, format)
    return _finished(y, around).to(x_RI.dtype)


def layer_bodies(bodies: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Of the bodies (op, body) chosen for a layer those that it calls: ops that fuse where a body does, else what they
    are made of.
    """
    chosen = dict(bodies)
    fusing = {name for name in FUSED if chosen.get(name, REFERENCE) != REFERENCE}
    parts = {f"{name.removeprefix('fused_')}_activation" for name in fusing}
    return tuple(
        (name, body) for name, body in chosen.items() if name not in parts and (name in fusing or name not in FUSED)
    )


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype is torch.float64 else t.float()


def _normed(x: Tensor, around: Around) -> Tensor:
    kind, weight, bias, eps, offset = around[:5]
    if kind is None:
        return x
    return (
        rms_norm.reference(x, weight, eps, offset)
        if kind == "rms"
        else layer_norm.reference(x, weight, bias, eps, offset)
    )


def _finished(y: Tensor, around: Around) -> Tensor:
    if around.activation is not None:
        y = (gated_activation if around.gated else activation).reference(y, around.activation)
    return y if around.residual is None else around.residual + y


@fused_linear.fake
def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, *given: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], Around(*given).outputs(weight.shape[0]))


@fused_quantized_linear.fake
def _quantized_fake(x: Tensor, *given: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], Around(*given[7:]).outputs(given[4]))


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
        parts = (
            norm,
            "weight" if weighed else "",
            f"offset {offset:.0f}",
            act,
            "gated" if gated else "",
            "residual" if added else "",
        )
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
