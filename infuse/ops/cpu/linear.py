"""The matrix products of ops/linear.py in C++ for few rows (src/linear.h): weights are streamed once, as they lie.

With more rows the product is bound by arithmetic: PyTorch's own is taken, over a quantized weight's values in the dtype of x.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from infuse.ops.cpu import DTYPES, kernels, needs
from infuse.ops.linear import linear, quantized_linear

MOST_ROWS = 8
MOST_QUANTIZED_ROWS = 24  # where streaming takes as long as dequantizing and F.linear: 1024 x 1024, bfloat16, AVX-512
# F.linear is as fast over weights that stay in a core's cache: of this many elements with one row, or with more rows in float32.
# PyTorch's own product of one row in float16 is faster: 21 GB/s against 16 on one thread.
SMALL_ONE_ROW, SMALL_FLOAT32 = 1 << 13, 1 << 18
MOST_INPUTS = 65536  # the scales of one weight row lie on the stack (kMostGroups groups of 32)
BITS = {"int8": 8, "int4": 4}  # the formats that there are kernels for


@linear.implement("cpu", needs)
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    inputs, dtype = weight.size(1), x.dtype
    values = x.numel()
    small = SMALL_ONE_ROW if values <= inputs else SMALL_FLOAT32 if dtype is torch.float32 else 0
    if values > MOST_ROWS * inputs or weight.numel() <= small or (dtype is torch.float16 and values <= inputs):
        return F.linear(x, weight, bias)
    if dtype is weight.dtype and dtype in DTYPES and x.is_contiguous() and weight.is_contiguous() and _fits(bias, dtype):
        return kernels().linear.default(x, weight, bias)
    return F.linear(x, weight, bias)


@quantized_linear.implement("cpu", needs)
def _quantized_linear(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, outputs: int, inputs: int, format: str
) -> Any:
    groups, bits = scale.size(1), BITS.get(format.partition(":")[0])
    if bits is None or inputs == 0 or inputs % (32 * groups) or inputs > MOST_INPUTS or x.dtype not in DTYPES or not data.is_contiguous():
        return quantized_linear.reference(x, data, scale, zero, bias, outputs, inputs, format)
    if x.numel() <= MOST_QUANTIZED_ROWS * inputs and x.is_contiguous() and _fits(bias, x.dtype):
        return kernels().quantized_linear.default(x, data, scale, zero, bias, bits)
    weight = torch.empty(outputs, inputs, dtype=x.dtype, device=x.device)
    kernels().dequantize.default(data, scale, zero, bits, weight)
    return F.linear(x, weight, bias)


def _fits(bias: Tensor | None, dtype: torch.dtype) -> bool:
    return bias is None or (bias.dtype is dtype and bias.is_contiguous())
