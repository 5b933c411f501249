"""The norms of ops/norm.py in Triton (kernels/norm.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infuse.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from infuse.ops.triton import kernels, needs
from infuse.ops.triton.configurations import power_above, row_warps

LARGEST_WIDTH = 1 << 15  # one program holds a row in its registers


def _takes(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether the kernel supports these tensors; if not, PyTorch's functions run."""
    width = x.shape[-1]
    alike = residual is None or (residual.dtype == x.dtype and residual.shape == x.shape)
    if not 0 < width <= LARGEST_WIDTH or not alike:
        return False
    whole = (width,) if weight is None or weight.dim() == 1 else x.shape[-2:]
    return all(t is None or (t.is_contiguous() and t.shape == whole) for t in (weight, bias))


def _normed(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    *,
    centred: bool,
) -> tuple[Tensor, Tensor]:
    """(x + residual, its norm); the first is x if there is no residual."""
    x, width = x.contiguous(), x.shape[-1]
    residual = None if residual is None else residual.contiguous()
    out, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
    if rows := x.numel() // width:
        heads = 1 if weight is None else weight.numel() // width
        kernels("norm").norm_rows[(rows,)](
            x, residual, weight, bias, out, total, heads, width, eps, offset, CENTRED=centred, BLOCK=power_above(width),
            num_warps=row_warps(width),
        )  # fmt: skip
    return total, out


@rms_norm.implement("triton", needs)
def _rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Any:
    if not _takes(x, None, weight, None):
        return rms_norm.body("torch")(x, weight, eps, offset)
    return _normed(x, None, weight, None, eps, offset, centred=False)[1]


@layer_norm.implement("triton", needs)
def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float) -> Any:
    if not _takes(x, None, weight, bias):
        return layer_norm.body("torch")(x, weight, bias, eps, offset)
    return _normed(x, None, weight, bias, eps, offset, centred=True)[1]


@add_rms_norm.implement("triton", needs)
def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float) -> Any:
    if not _takes(x, residual, weight, None):
        return add_rms_norm.body("torch")(x, residual, weight, eps, offset)
    return _normed(x, residual, weight, None, eps, offset, centred=False)


@add_layer_norm.implement("triton", needs)
def _add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float
) -> Any:
    if not _takes(x, residual, weight, bias):
        return add_layer_norm.body("torch")(x, residual, weight, bias, eps, offset)
    return _normed(x, residual, weight, bias, eps, offset, centred=True)
