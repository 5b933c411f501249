"""Norms and sums that a time step modulates: norm(x) * (1 + scale) + shift, and residual + gate * x.

Suffixes: B batch, T tokens, C channels. scale, shift and gate hold one row for each row of the batch, in x.dtype or in
float32; they may be columns of a wider matrix.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from infuse.ops.norm import layer_norm, rms_norm
from infuse.ops.op import Case, op


@op("modulated_norm(Tensor x, Tensor scale, Tensor shift, float eps, bool centred) -> Tensor")
def modulated_norm(x_BTC: Tensor, scale_BC: Tensor, shift_BC: Tensor, eps: float, centred: bool) -> Tensor:
    """norm(x) * (1 + scale) + shift, computed in float32, in x.dtype (Peebles and Xie 2023, adaLN).

    The norm is a layer norm if `centred`, else an RMS norm.
    """
    x = x_BTC.float()
    y = layer_norm.reference(x, None, None, eps, 0.0) if centred else rms_norm.reference(x, None, eps, 0.0)
    return (y * (1 + scale_BC.float()[:, None]) + shift_BC.float()[:, None]).to(x_BTC.dtype)


@op("gated_add(Tensor x, Tensor gate, Tensor residual) -> Tensor")
def gated_add(x_BTC: Tensor, gate_BC: Tensor, residual_BTC: Tensor) -> Tensor:
    """residual + gate * x, computed in float32, in x.dtype."""
    return (residual_BTC.float() + gate_BC.float()[:, None] * x_BTC.float()).to(x_BTC.dtype)


@op(
    "gated_add_norm(Tensor x, Tensor gate, Tensor residual, Tensor scale, Tensor shift, float eps, bool centred)"
    " -> (Tensor, Tensor)"
)
def gated_add_norm(
    x: Tensor, gate: Tensor, residual: Tensor, scale: Tensor, shift: Tensor, eps: float, centred: bool
) -> tuple[Tensor, Tensor]:
    """The gated sum, and its modulated norm; the sum is rounded to x.dtype before it is normalised."""
    total = gated_add.reference(x, gate, residual)
    return total, modulated_norm.reference(total, scale, shift, eps, centred)


@modulated_norm.implement("torch")
def _modulated_norm_torch(x: Tensor, scale: Tensor, shift: Tensor, eps: float, centred: bool) -> Tensor:
    if x.dtype == torch.float64:
        return modulated_norm.reference(x, scale, shift, eps, centred)
    norm = F.layer_norm if centred else F.rms_norm
    normed = norm(x.float(), x.shape[-1:], eps=eps)
    return torch.addcmul(shift.float()[:, None], normed, 1 + scale.float()[:, None]).to(x.dtype)


@gated_add.implement("torch")
def _gated_add_torch(x: Tensor, gate: Tensor, residual: Tensor) -> Tensor:
    return torch.addcmul(residual.float(), x.float(), gate.float()[:, None]).to(x.dtype)


@gated_add_norm.implement("torch")
def _gated_add_norm_torch(
    x: Tensor, gate: Tensor, residual: Tensor, scale: Tensor, shift: Tensor, eps: float, centred: bool
) -> tuple[Tensor, Tensor]:
    total = _gated_add_torch(x, gate, residual)
    return total, _modulated_norm_torch(total, scale, shift, eps, centred)


@modulated_norm.fake
def _norm_fake(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@gated_add.fake
def _add_fake(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@gated_add_norm.fake
def _add_norm_fake(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _add_fake(x), _add_fake(x)


_SIZES = ((1, 7, 96), (2, 1, 33), (3, 5, 16), (2, 0, 8), (1, 70, 300))


def _inputs(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """Yield a label, x, residual, gate, scale and shift; the last three are columns of one matrix."""
    for batch, tokens, columns in _SIZES:
        x, residual = (torch.randn(batch, tokens, columns, dtype=dtype, device=device) * 3 for _ in range(2))
        for wide in (dtype, torch.float32)[: 1 if dtype == torch.float32 else 2]:
            modulation = torch.randn(batch, 3 * columns, dtype=wide, device=device)
            label = f"{batch}x{tokens}x{columns}{'' if wide == dtype else ' by float32'}"
            yield label, (x, residual, *modulation.chunk(3, dim=-1))


@modulated_norm.cases
def _norm_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for label, (x, _, _, scale, shift) in _inputs(dtype, device):
        yield Case(label, (x, scale, shift, 1e-6, True))
        yield Case(f"{label} rms", (x, scale, shift, 1e-6, False))


@gated_add.cases
def _add_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for label, (x, residual, gate, _, _) in _inputs(dtype, device):
        yield Case(label, (x, gate, residual))


@gated_add_norm.cases
def _add_norm_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for label, (x, residual, gate, scale, shift) in _inputs(dtype, device):
        yield Case(label, (x, gate, residual, scale, shift, 1e-6, True))
        yield Case(f"{label} rms", (x, gate, residual, scale, shift, 1e-6, False))
