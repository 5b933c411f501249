"""The ops of ops/modulated.py in Triton (kernels/modulated.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infuse.ops.modulated import gated_add, gated_add_norm, modulated_norm
from infuse.ops.triton import kernels, needs
from infuse.ops.triton.configurations import power_above, row_warps
from infuse.ops.triton.norm import LARGEST_WIDTH


def _takes(x: Tensor, residual: Tensor | None, *rows: Tensor) -> bool:
    """Whether the kernel supports these tensors; if not, PyTorch's functions run."""
    if x.dim() != 3 or not 0 < x.shape[-1] <= LARGEST_WIDTH or (residual is not None and residual.shape != x.shape):
        return False
    return all(row.shape == (x.shape[0], x.shape[2]) and row.stride(1) == 1 for row in rows)


def _run(
    x: Tensor,
    gate: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor]:
    """(residual + gate * x, the modulated norm); without a gate, or a scale, the first or the second holds nothing."""
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    total, out = torch.empty_like(x), torch.empty_like(x)
    batch, tokens, width = x.shape
    if batch * tokens:
        strides = (0 if row is None else row.stride(0) for row in (gate, scale, shift))
        kernels("modulated").modulated_rows[(batch * tokens,)](
            x, gate, residual, scale, shift, total, out, tokens, width, *strides, eps, CENTRED=centred,
            BLOCK=power_above(width), num_warps=row_warps(width),
        )  # fmt: skip
    return total, out


@modulated_norm.implement("triton", needs)
def _modulated_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float, centred: bool) -> Any:
    if not _takes(x, None, scale, shift):
        return modulated_norm.body("torch")(x, scale, shift, eps, centred)
    return _run(x, None, None, scale, shift, eps, centred)[1]


@gated_add.implement("triton", needs)
def _gated_add(x: Tensor, gate: Tensor, residual: Tensor) -> Any:
    if not _takes(x, residual, gate):
        return gated_add.body("torch")(x, gate, residual)
    return _run(x, gate, residual, None, None, 0.0, True)[0]


@gated_add_norm.implement("triton", needs)
def _gated_add_norm(
    x: Tensor, gate: Tensor, residual: Tensor, scale: Tensor, shift: Tensor, eps: float, centred: bool
) -> Any:
    if not _takes(x, residual, gate, scale, shift):
        return gated_add_norm.body("torch")(x, gate, residual, scale, shift, eps, centred)
    return _run(x, gate, residual, scale, shift, eps, centred)
