"""RMSNorm and LayerNorm, alone or fused with the preceding residual addition.

Suffixes: R rows (any number of axes), H heads, C normalised width. A weight of shape [H, C] holds one weight per head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from infuse.ground.modes import kept
from infuse.ops.op import Case, CaseMaker, op


@op("rms_norm(Tensor x, Tensor? weight, float eps, float offset) -> Tensor")
def rms_norm(x_RC: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    """x / rms(x) * (offset + weight) over the last axis, computed in float32, in x.dtype (Zhang and Sennrich 2019)."""
    wide = x_RC.float()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (weight.float() + offset)
    return y.to(x_RC.dtype)


@op("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, float offset) -> Tensor")
def layer_norm(x_RC: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float) -> Tensor:
    """(x - mean) / std * (offset + weight) + bias over the last axis, computed in float32 (Ba et al. 2016)."""
    wide = x_RC.float()
    wide = wide - wide.mean(-1, keepdim=True)
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (weight.float() + offset)
    if bias is not None:
        y = y + bias.float()
    return y.to(x_RC.dtype)


@op("add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float offset) -> (Tensor, Tensor)")
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """(x + residual, rms_norm(x + residual)); the sum is rounded to x.dtype before it is normalised."""
    total = x + residual
    return total, rms_norm.reference(total, weight, eps, offset)


@op(
    "add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, float offset)"
    " -> (Tensor, Tensor)"
)
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """(x + residual, layer_norm(x + residual)); the sum is rounded to x.dtype before it is normalised."""
    total = x + residual
    return total, layer_norm.reference(total, weight, bias, eps, offset)


@rms_norm.implement("torch")
def _rms_norm_torch(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    if x.dtype == torch.float64:
        return rms_norm.reference(x, weight, eps, offset)
    if x.is_cuda and (weight is None or (weight.dim() == 1 and not offset and weight.dtype == x.dtype)):
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    # On CPUs F.rms_norm runs a dozen small operations. This runs half as many: 1 / rms = rsqrt(eps + |x|^2 / C).
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    y = torch.addcmul(_scalar(eps, x.device), length, length, value=1 / max(x.shape[-1], 1)).rsqrt_().mul(x)
    if weight is not None:
        y = y.mul_(weight.float() + offset if offset else weight)
    return y if y.dtype is x.dtype else y.to(x.dtype)


@kept
def _scalar(value: float, device: torch.device) -> Tensor:
    return torch.full((), value, device=device)


@layer_norm.implement("torch")
def _layer_norm_torch(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float) -> Tensor:
    if weight is not None and weight.dim() > 1:
        return layer_norm.reference(x, weight, bias, eps, offset)
    if weight is not None and offset:
        weight = weight + offset
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


@add_rms_norm.implement("torch")
def _add_rms_norm_torch(x: Tensor, residual: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, _rms_norm_torch(total, *arguments)


@add_layer_norm.implement("torch")
def _add_layer_norm_torch(x: Tensor, residual: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, _layer_norm_torch(total, *arguments)


@rms_norm.fake
@layer_norm.fake
def _like_x(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@add_rms_norm.fake
@add_layer_norm.fake
def _like_x_twice(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _like_x(x), _like_x(x)


_SHAPES = ((1, 64), (3, 7, 96), (2, 1, 33), (0, 64), (2, 5, 4, 16))


def _inputs(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor, Tensor | None, float]]:
    for shape in _SHAPES:
        x = torch.randn(shape, dtype=dtype, device=device) * 3
        weight = torch.randn(shape[-1:], dtype=dtype, device=device)
        yield f"{shape}", x, weight, 0.0
        yield f"{shape} offset", x, weight, 1.0
        yield f"{shape} bare", x, None, 0.0
    heads = torch.randn(2, 3, 4, 16, dtype=dtype, device=device)
    yield "a weight for each head", heads, torch.randn(4, 16, dtype=dtype, device=device), 0.0


@rms_norm.cases
def _rms_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for label, x, weight, offset in _inputs(dtype, device):
        yield Case(label, (x, weight, 1e-6, offset))


@layer_norm.cases
def _layer_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for label, x, weight, offset in _inputs(dtype, device):
        bias = None if weight is None else torch.randn_like(weight)
        yield Case(label, (x, weight, bias, 1e-5, offset))


def _after_addition(cases: CaseMaker) -> CaseMaker:
    def made(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
        for case in cases(dtype, device):
            x, *arguments = case.args
            yield Case(case.label, (x, torch.randn_like(x), *arguments))

    return made


add_rms_norm.cases(_after_addition(_rms_cases))
add_layer_norm.cases(_after_addition(_layer_cases))
