"""The matrix products of ops/linear.py with plain weights in C++, for few rows (src/plain_linear.h): weights are streamed once, as
they lie. With more rows the product is bound by arithmetic, and PyTorch's own is taken.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from infuse.ops.cpu import DTYPES, kernels, needs
from infuse.ops.linear import linear

MOST_ROWS = 8
# F.linear is as fast over weights that stay in a core's cache: of this many elements with one row, or with more rows in float32.
# PyTorch's own product of one row in float16 is faster: 21 GB/s against 16 on one thread.
SMALL_ONE_ROW, SMALL_FLOAT32 = 1 << 13, 1 << 18


@linear.implement("cpu", needs)
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    inputs, dtype = weight.size(1), x.dtype
    values = x.numel()
    small = SMALL_ONE_ROW if values <= inputs else SMALL_FLOAT32 if dtype is torch.float32 else 0
    if values > MOST_ROWS * inputs or weight.numel() <= small or (dtype is torch.float16 and values <= inputs):
        return F.linear(x, weight, bias)
    if dtype is weight.dtype and dtype in DTYPES and x.is_contiguous() and weight.is_contiguous() and fits(bias, dtype):
        return kernels().linear.default(x, weight, bias)
    return F.linear(x, weight, bias)


def fits(bias: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether the kernels take this bias."""
    return bias is None or (bias.dtype is dtype and bias.is_contiguous())
