"""The matrix products of ops/linear.py in C++ for few rows (src/linear.h): weights are streamed once, as they lie.

With more rows the product is bound by arithmetic, and PyTorch's own is taken.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from infuse.ops.cpu import DTYPES, kernels, needs
from infuse.ops.linear import linear

MOST_ROWS = 8


@linear.implement("cpu", needs)
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    if x.numel() <= MOST_ROWS * weight.shape[1] and x.dtype in DTYPES and x.dtype == weight.dtype and x.is_contiguous() and weight.is_contiguous():
        return kernels().linear.default(x, weight, bias)
    return F.linear(x, weight, bias)
