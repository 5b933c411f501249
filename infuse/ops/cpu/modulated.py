"""The ops of ops/modulated.py in C++ (src/modulated.h)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infuse.native import DTYPES, kernels, needs
from infuse.ops.modulated import gated_add, gated_add_norm, modulated_norm


def _takes(x: Tensor, residual: Tensor | None, *rows: Tensor) -> bool:
    """Whether the kernels support these: x [B, T, C] and residual contiguous; rows [B, C] with whole columns, in the
    dtype of x or all in float32.
    """
    if x.dtype not in DTYPES or x.dim() != 3 or not x.is_contiguous() or not x.numel():
        return False
    if residual is not None and not (
        residual.dtype is x.dtype and residual.shape == x.shape and residual.is_contiguous()
    ):
        return False
    shape, dtype = (x.shape[0], x.shape[2]), rows[0].dtype
    if dtype not in (x.dtype, torch.float32):
        return False
    return all(row.dtype is dtype and row.shape == shape and row.stride(1) == 1 for row in rows)


@modulated_norm.implement("cpu", needs)
def _modulated_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float, centred: bool) -> Any:
    if _takes(x, None, scale, shift):
        return kernels().modulated_norm.default(x, scale, shift, eps, centred)
    return modulated_norm.body("torch")(x, scale, shift, eps, centred)


@gated_add.implement("cpu", needs)
def _gated_add(x: Tensor, gate: Tensor, residual: Tensor) -> Any:
    if _takes(x, residual, gate):
        return kernels().gated_add.default(x, gate, residual)
    return gated_add.body("torch")(x, gate, residual)


@gated_add_norm.implement("cpu", needs)
def _gated_add_norm(
    x: Tensor, gate: Tensor, residual: Tensor, scale: Tensor, shift: Tensor, eps: float, centred: bool
) -> Any:
    if _takes(x, residual, gate, scale, shift):
        return kernels().gated_add_norm.default(x, gate, residual, scale, shift, eps, centred)
    return gated_add_norm.body("torch")(x, gate, residual, scale, shift, eps, centred)
