"""The matrix products of ops/linear.py and ops/linear_activation.py in Triton: one row streams the weight (kernels/stream.py), some rows
multiply tiles of it (kernels/product.py), and more are PyTorch's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from infuse.ops.activation import activation, gated_activation
from infuse.ops.linear import linear
from infuse.ops.linear_activation import linear_activation
from infuse.ops.triton import DTYPES, kernels, needs
from infuse.ops.triton.configurations import COMBINED_BLOCK, MOST_PLAIN_ROWS, plain_row, plain_tiles


@linear.implement("triton", needs)
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    y = _few_rows(x, weight, bias, None, False)
    return F.linear(x, weight, bias) if y is None else y


@linear_activation.implement("triton", needs)
def _linear_activation(x: Tensor, weight: Tensor, bias: Tensor | None, name: str, gated: bool) -> Any:
    y = _few_rows(x, weight, bias, name, gated)
    return (gated_activation if gated else activation).body("triton")(F.linear(x, weight, bias), name) if y is None else y


def _few_rows(x: Tensor, weight: Tensor, bias: Tensor | None, name: str | None, gated: bool) -> Tensor | None:
    """The product and activation of up to MOST_PLAIN_ROWS rows; None where PyTorch's is to be used."""
    outputs, inputs = weight.shape
    rows = x.numel() // max(inputs, 1)
    most = 1 if x.dtype is torch.float32 else MOST_PLAIN_ROWS  # more rows in float32 have no tensor cores: PyTorch's is as good
    if not 0 < rows <= most or outputs == 0 or x.dtype is not weight.dtype or x.dtype not in DTYPES:
        return None
    if weight.stride(1) != 1 or (gated and outputs % 2):
        return None
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    wanted, stride = outputs // 2 if gated else outputs, weight.stride(0)
    out = x.new_empty(*x.shape[:-1], wanted)
    chosen = plain_row(wanted, inputs, x.element_size()) if rows == 1 else plain_tiles(rows, wanted, inputs)
    to = out if chosen.splits == 1 else x.new_empty(chosen.splits, rows, outputs, dtype=torch.float32)
    grid = (-(-wanted // chosen.outputs), chosen.splits)
    if rows == 1:
        kernels("stream").plain_row[grid](
            x, weight, bias, to, inputs, outputs, stride, GATED=gated, NAME=name, OUTPUTS=chosen.outputs, INPUTS=chosen.depth,
            SPLITS=chosen.splits, num_warps=chosen.warps,
        )  # fmt: skip
    else:
        kernels("product").product_tiles[grid](
            x, weight, None, None, bias, to, rows, inputs, outputs, inputs, stride, 1, 1, FORMAT="plain", GATED=gated, NAME=name,
            SEGMENT=chosen.depth, ROWS=chosen.rows, OUTPUTS=chosen.outputs, SEGMENTS=1, SPLITS=chosen.splits, num_warps=chosen.warps,
            num_stages=chosen.stages,
        )  # fmt: skip
    if chosen.splits > 1:
        combine(to, bias, out, name, gated)
    return out


def combine(parts: Tensor, bias: Tensor | None, out: Tensor, name: str | None, gated: bool) -> None:
    """The sum over the first axis of parts [SPLITS, rows, outputs], with bias and activation, into `out`: always in the same order."""
    splits, rows, outputs = parts.shape
    grid = (-(-(outputs // 2 if gated else outputs) // COMBINED_BLOCK), rows)
    kernels("product").combine[grid](
        parts, bias, out, rows, outputs, GATED=gated, NAME=name, SPLITS=splits, BLOCK=COMBINED_BLOCK, num_warps=4
    )  # fmt: skip
