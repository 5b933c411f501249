"""Quantize a weight matrix, and the way back.

Suffixes: I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from infuse.ground.device import Device
from infuse.ops.op import Case, op
from infuse.quant.format import QuantizedWeight
from infuse.quant.parse import quant_format


@op("quantize(Tensor weight, str format) -> Tensor[]")
def quantize(weight_OI: Tensor, format: str) -> list[Tensor]:
    """Quantize to `format`; return the buffers of a QuantizedWeight, in their order.

    Raises ConfigError as QuantFormat.quantize does.
    """
    return [*quant_format(format).quantize(weight_OI).tensors.values()]


@quantize.fake
def quantized_like(weight: Tensor, format: str) -> list[Tensor]:
    """Uninitialised buffers for `weight` in `format`, on its device."""
    outputs, inputs = weight.shape
    return [*quant_format(format).empty((outputs, inputs), weight.device).tensors.values()]


_TEXTS = (
    "int8", "int8:7", "int8:row:asymmetric", "int8:groups=2", "int4:32", "int4:6:asymmetric", "int4:row",
    "int4:groups=2:asymmetric", "fp8", "fp8:7", "fp8:groups=2", "fp6", "fp6:4", "fp6:row", "int4:32:asymmetric:f16",
    "int8:64:f32", "nf4:32", "q4_1", "nvfp4", "int3:8", "int3:32:asymmetric", "int2:16:f16", "int2:32:asymmetric",
    "int4:32:offset", "int4:32:offset:f16", "int3:32:offset", "int2:32:offset",
)  # fmt: skip
_SHAPES = ((0, 64), (1, 64), (33, 128), (7, 42), (3, 4160))


@op("dequantize(Tensor[] buffers, int outputs, int inputs, str format, ScalarType dtype) -> Tensor")
def dequantize(buffers: Sequence[Tensor], outputs: int, inputs: int, format: str, dtype: torch.dtype) -> Tensor:
    """Values [outputs, inputs] of a quantized weight: exact in float32, rounded once for a narrower `dtype`."""
    chosen = quant_format(format)
    return chosen.dequantize(QuantizedWeight.listed(buffers, (outputs, inputs), chosen), dtype)


@dequantize.fake
def _values_like(buffers: Sequence[Tensor], outputs: int, inputs: int, format: str, dtype: torch.dtype) -> Tensor:
    return buffers[0].new_empty(outputs, inputs, dtype=dtype)


def values_of(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Dequantize `weight`, in its format's own layout, by the body of its device."""
    body = dequantize.choose(Device.of(weight.device), torch.float32).body
    return dequantize.body(body)([*weight.tensors.values()], *weight.shape, str(weight.format), dtype)


@quantize.cases
def _cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for text in _TEXTS:
        for outputs, inputs in _SHAPES:
            if quant_format(text).fits(inputs) is None:
                weight = torch.randn(outputs, inputs, device=device) / inputs**0.5
                yield Case(f"{text} {outputs}x{inputs}", (weight.to(dtype), text))


@dequantize.cases
def _coded_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for text in (*_TEXTS, "q2_k", "q3_k", "q4_k", "q5_0", "q6_k"):
        for outputs, inputs in (*_SHAPES, (18, 512)):
            if quant_format(text).fits(inputs) is None:
                weight = quant_format(text).quantize(torch.randn(outputs, inputs, device=device))
                args = ([*weight.tensors.values()], outputs, inputs, text, dtype)
                yield Case(f"{text} {outputs}x{inputs}", args)
