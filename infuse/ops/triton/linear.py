"""The products of ops/linear.py with plain weights in Triton.

One row streams the weight (kernels/stream.py), up to FEW_ROWS rows multiply tiles of it (kernels/product.py), and more
rows use PyTorch's product.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from infuse.ground.modes import PLAIN
from infuse.ops.linear import FEW_ROWS, Fusion, linear
from infuse.ops.triton import DTYPES, kernels, needs
from infuse.ops.triton.configurations import COMBINED_BLOCK, MOST_NORMED_ROWS, norm_block, plain_row, plain_tiles

ALONE = Fusion()


@linear.implement("triton", needs, fuses=True)
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, *fusion: Any) -> Any:
    x, around = normed_before(x, Fusion(*fusion) if fusion else ALONE)
    y = _few_rows(x, weight, bias, around)
    return around.separately(lambda x: F.linear(x, weight, bias), x, "triton") if y is None else y


def normed_before(x: Tensor, around: Fusion) -> tuple[Tensor, Fusion]:
    """Normalise x with the norm's own kernel if the product's kernel cannot or would be slower.

    Returns x and the neighbours of the product that remain.
    """
    if around.norm is None:
        return x, around
    norm_tensors = around.norm_weight, around.norm_bias
    fits = all(t is None or (t.is_contiguous() and t.shape == x.shape[-1:]) for t in norm_tensors)
    if fits and x.numel() <= MOST_NORMED_ROWS * x.shape[-1]:
        return x, around
    return around.before(x, "triton"), around._replace(norm=None)


def constants(around: Fusion, rows: int, inputs: int) -> dict[str, Any]:
    """The compile-time constants of a kernel whose tiles have `rows` rows."""
    block = norm_block(rows, inputs) if around.norm else 1
    return {"NORM": around.norm, "BLOCK": block, "GATED": around.gated, "NAME": around.activation}


def _few_rows(x: Tensor, weight: Tensor, bias: Tensor | None, around: Fusion) -> Tensor | None:
    """The product of up to FEW_ROWS rows and its neighbours; None if PyTorch's product is better."""
    outputs, inputs = weight.shape
    rows, gated, residual = x.numel() // max(inputs, 1), around.gated, around.residual
    # Two or more rows in float32 cannot use tensor cores, so PyTorch's product is as good.
    most = 1 if x.dtype is torch.float32 else FEW_ROWS
    if not 0 < rows <= most or outputs == 0 or x.dtype is not weight.dtype or x.dtype not in DTYPES:
        return None
    if type(weight) not in PLAIN or weight.stride(1) != 1 or (gated and outputs % 2) or x.shape[-1] != inputs:
        return None
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    around = around if residual is None else around._replace(residual=residual.contiguous())
    wanted, stride = around.outputs(outputs), weight.stride(0)
    out = x.new_empty(*x.shape[:-1], wanted)
    chosen = (
        plain_row(outputs, inputs, x.element_size(), gated) if rows == 1 else plain_tiles(rows, outputs, inputs, gated)
    )
    least = 1 if rows == 1 else 16  # smallest side of a tensor-core tile
    tile = max(around.outputs(chosen.outputs), least)
    to = out if chosen.splits == 1 else x.new_empty(chosen.splits, rows, outputs, dtype=torch.float32)
    grid = (-(-wanted // tile), chosen.splits)
    options = constants(around, chosen.rows, inputs)
    options |= {"OUTPUTS": tile, "SPLITS": chosen.splits, "num_warps": chosen.warps}
    more = around.norm_weight, around.norm_bias, around.residual, to
    if rows == 1:
        kernels("stream").plain_row[grid](
            x, weight, bias, *more, inputs, outputs, stride, around.eps, around.offset, INPUTS=chosen.depth, **options
        )
    else:
        kernels("product").product_tiles[grid](
            x, weight, None, None, bias, *more, rows, inputs, outputs, inputs, stride, 1, 1, around.eps, around.offset,
            FORMAT="plain", SEGMENT=chosen.depth, ROWS=chosen.rows, SEGMENTS=1, num_stages=chosen.stages, **options,
        )  # fmt: skip
    if chosen.splits > 1:
        combine(to, bias, out, around)
    return out


def combine(parts: Tensor, bias: Tensor | None, out: Tensor, around: Fusion) -> None:
    """Sum parts [SPLITS, rows, outputs] over the first axis in a fixed order; apply bias, activation and residual.

    Writes the result to `out`.
    """
    splits, rows, outputs = parts.shape
    grid = (-(-around.outputs(outputs) // COMBINED_BLOCK), rows)
    kernels("product").combine[grid](
        parts, bias, around.residual, out, rows, outputs,
        GATED=around.gated, NAME=around.activation, SPLITS=splits, BLOCK=COMBINED_BLOCK, num_warps=4,
    )  # fmt: skip
