"""The norms of ops/norm.py in C++ (src/norm.h)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from infuse.native import DTYPES, kernels, needs
from infuse.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm


def takes(x: Tensor, weight: Tensor | None, *others: Tensor | None) -> bool:
    """Whether the kernels support these tensors: contiguous, of one dtype, one weight per column."""
    if x.dtype not in DTYPES or not x.is_contiguous():
        return False
    if weight is not None and (weight.dim() != 1 or weight.size(0) != x.size(-1)):
        return False
    return all(other is None or (other.dtype == x.dtype and other.is_contiguous()) for other in (weight, *others))


@rms_norm.implement("cpu", needs)
def _rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Any:
    if takes(x, weight):
        return kernels().norm.default(x, weight, None, eps, offset, False)
    return rms_norm.body("torch")(x, weight, eps, offset)


@layer_norm.implement("cpu", needs)
def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float) -> Any:
    if takes(x, weight, bias):
        return kernels().norm.default(x, weight, bias, eps, offset, True)
    return layer_norm.body("torch")(x, weight, bias, eps, offset)


@add_rms_norm.implement("cpu", needs)
def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float) -> Any:
    if takes(x, weight, residual):
        return kernels().add_norm.default(x, residual, weight, None, eps, offset, False)
    return add_rms_norm.body("torch")(x, residual, weight, eps, offset)


@add_layer_norm.implement("cpu", needs)
def _add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float
) -> Any:
    if takes(x, weight, bias, residual):
        return kernels().add_norm.default(x, residual, weight, bias, eps, offset, True)
    return add_layer_norm.body("torch")(x, residual, weight, bias, eps, offset)
