"""The matrix product and its neighbours in a layer: residual + act(norm(x) @ weight.T + bias).

There are two ops, for plain and for quantized weights, each with its own bodies, layouts and choice. Every body takes
every combination of neighbours and runs those that its kernel does not fuse as separate calls (`Fusion.separately`).
Suffixes: R rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from infuse.ops.activation import activation, gated_activation
from infuse.ops.norm import layer_norm, rms_norm
from infuse.ops.op import REFERENCE, Case, op
from infuse.quant.blocks import BLOCKS
from infuse.quant.format import QuantizedWeight
from infuse.quant.parse import quant_format

# Up to this many tokens (one tensor-core tile), blocks let a body that fuses run the norm and the residual addition.
# With more, plain products are PyTorch's, which reads the weight as fast, and one kernel for addition and norm is
# better.
FEW_ROWS = 16


class Fusion(NamedTuple):
    """The neighbours of a product: the optional arguments of both ops after the weight.

    `norm` is "rms" or "layer"; its weight and bias have the width of the inputs. `residual` has the shape of the
    result. `gated` computes act(gate) * up from weights [gate | up].
    """

    norm: str | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    eps: float = 0.0
    offset: float = 0.0
    activation: str | None = None
    gated: bool = False
    residual: Tensor | None = None

    def outputs(self, rows_of_weight: int) -> int:
        return rows_of_weight // 2 if self.gated else rows_of_weight

    def before(self, x: Tensor, body: str) -> Tensor:
        """norm(x), by the norm's `body`."""
        if self.norm is None:
            return x
        if self.norm == "rms":
            return rms_norm.body(body)(x, self.norm_weight, self.eps, self.offset)
        return layer_norm.body(body)(x, self.norm_weight, self.norm_bias, self.eps, self.offset)

    def after(self, y: Tensor, body: str) -> Tensor:
        """residual + act(y), by the activation's `body`."""
        if self.activation is not None:
            y = (gated_activation if self.gated else activation).body(body)(y, self.activation)
        return y if self.residual is None else self.residual + y

    def separately(self, product: Callable[[Tensor], Tensor], x: Tensor, body: str) -> Tensor:
        """Run norm, product, activation and residual one after another, by the bodies named `body`."""
        return self.after(product(self.before(x, body)), body)


NO_NORM = Fusion()[:5]
_AROUND = (
    "str? norm=None, Tensor? norm_weight=None, Tensor? norm_bias=None, float eps=0.0, float offset=0.0,"
    " str? activation=None, bool gated=False, Tensor? residual=None"
)


@op(f"linear(Tensor x, Tensor weight, Tensor? bias, {_AROUND}) -> Tensor")
def linear(x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, *around: Any) -> Tensor:
    """residual + act(norm(x) @ weight.T + bias). Rounds each step to x.dtype, which a body need not do.

    `around`: the first fields of Fusion, in order.
    """
    if not around:
        return F.linear(x_RI, weight_OI, bias_O)
    return Fusion(*around).separately(lambda x: F.linear(x, weight_OI, bias_O), x_RI, REFERENCE)


@op(
    "quantized_linear(Tensor x, Tensor[] buffers, Tensor? bias, int outputs, int inputs, str format,"
    f" {_AROUND}) -> Tensor"
)
def quantized_linear(
    x_RI: Tensor, buffers: Sequence[Tensor], bias_O: Tensor | None, outputs: int, inputs: int, format: str, *around: Any
) -> Tensor:
    """`linear` with a dequantized weight, from the buffers of a QuantizedWeight in `format`, in their order."""
    chosen = quant_format(format)
    weight_OI = chosen.dequantize(QuantizedWeight.listed(buffers, (outputs, inputs), chosen), x_RI.dtype)
    return linear.reference(x_RI, weight_OI, bias_O, *around)


@linear.fake
def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None, *around: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], Fusion(*around).outputs(weight.shape[0]))


@quantized_linear.fake
def _quantized_fake(x: Tensor, *arguments: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], Fusion(*arguments[5:]).outputs(arguments[2]))


@linear.flops
def _linear_flops(x: Sequence[int], weight: Sequence[int], *_: Any) -> int:
    return 2 * prod(x) * weight[0]


@quantized_linear.flops
def _quantized_flops(x: Sequence[int], buffers: Any, bias: Any, outputs: int, *_: Any) -> int:
    return 2 * prod(x) * outputs


# Rows, inputs, outputs; norm, its weight and bias, offset; activation, gated; bias, residual.
_CASES = (
    ((1,), 64, 96, None, False, False, 0.0, None, False, False, False),
    ((2, 3), 128, 33, None, False, False, 0.0, None, False, True, False),
    ((0,), 64, 8, None, False, False, 0.0, None, False, True, False),
    ((7,), 192, 1, None, False, False, 0.0, None, False, True, False),
    ((2, 9), 128, 34, None, False, False, 0.0, "gelu", False, True, False),
    ((3, 20), 192, 2, None, False, False, 0.0, "silu", True, False, False),
    ((0,), 64, 8, None, False, False, 0.0, "relu2", False, True, False),
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


def _neighbours(
    dtype: torch.dtype, device: torch.device, block: int = 1
) -> Iterator[tuple[str, Tensor, int, int, Tensor | None, Fusion]]:
    """Yield a label, x, outputs, inputs in whole blocks, the bias and the neighbours."""
    for rows, least, outputs, norm, weighed, shifted, offset, act, gated, biased, added in _CASES:
        inputs = -(-least // block) * block

        def made(*shape: int, there: bool = True) -> Tensor | None:
            return torch.randn(shape, dtype=dtype, device=device) if there else None

        weight, shift = made(inputs, there=weighed), made(inputs, there=shifted)
        residual = made(*rows, outputs // 2 if gated else outputs, there=added)
        around = Fusion(norm, weight, shift, 1e-5, offset, act, gated, residual)
        bias = made(outputs, there=biased)
        words = (
            norm,
            weighed and "weight",
            norm and f"offset {offset:.0f}",
            act,
            gated and "gated",
            biased and "bias",
            added and "residual",
        )
        label = " ".join((f"{rows}x{inputs}->{outputs}", *(word for word in words if word)))
        x = torch.randn(*rows, inputs, dtype=dtype, device=device)
        yield label, x * 3 + 1 if norm else x, outputs, inputs, bias, around


@linear.cases
def _cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for label, x, outputs, inputs, bias, around in _neighbours(dtype, device):
        yield Case(label, (x, torch.randn(outputs, inputs, dtype=dtype, device=device) / inputs**0.5, bias, *around))


@quantized_linear.cases
def _quantized_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    texts = (
        "int8", "int8:64:asymmetric", "int4", "int4:32:asymmetric", "fp8", "fp8:32", "fp6", "fp6:row", "mxfp4",
        "int4:f16", "int8:32:f32", "fp8:64:f32", "nf4", "fp4:32", "int3", "int3:32:asymmetric:f16", "int2:16",
        "int2:32:asymmetric:f32", *BLOCKS, "int4:32:offset", "int3:32:offset:f16", "int2:16:offset",
    )  # fmt: skip
    for i, text in enumerate(texts):
        cases = _neighbours(dtype, device, block.inputs if (block := BLOCKS.get(text)) else 1)
        for label, x, outputs, inputs, bias, around in list(cases)[i % 2 :: 2]:
            weight = quant_format(text).quantize(torch.randn(outputs, inputs, device=device) / inputs**0.5)
            args = (x, [*weight.tensors.values()], bias, outputs, inputs, text, *around)
            yield Case(f"{text} {label}", args)
