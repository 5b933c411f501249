"""The ops of recurrent mixers in C++ (src/recurrence.h): causal_conv, linear_attention, gated_norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infuse.native import DTYPES, kernels, needs
from infuse.ops.causal_conv import causal_conv
from infuse.ops.decay import decay
from infuse.ops.gated_norm import gated_norm
from infuse.ops.recurrence import linear_attention

MOST_TAPS, MOST_KEY_WIDTH = 16, 256  # kMostTaps, kMostKeyWidth in src/recurrence_kernels.h


def is_sliced(*tensors: Tensor | None) -> bool:
    """Whether the axes after the tokens' are contiguous in tensors [B, T, ...]."""
    return all(each is None or each[0, 0].is_contiguous() for each in tensors)


def is_whole(dtype: torch.dtype, *tensors: Tensor | None) -> bool:
    return all(each is None or (each.dtype is dtype and each.is_contiguous()) for each in tensors)


@causal_conv.implement("cpu", needs)
def _causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, gate: Tensor | None, out_gate: Tensor | None,
    silu: bool,
) -> Any:  # fmt: skip
    given = (x, gate, out_gate)
    (batch, _, channels), taps = x.shape, weight.shape[1]
    takes = x.dtype in DTYPES and x.numel() > 0 and weight.dtype in (x.dtype, torch.float32)
    takes = takes and 0 < taps <= MOST_TAPS and is_whole(x.dtype, state) and is_whole(weight.dtype, weight, bias)
    takes = takes and weight.shape == (channels, taps) and (bias is None or bias.shape == (channels,))
    takes = takes and all(each is None or each.shape == x.shape for each in given)
    takes = takes and (state is None or state.shape == (batch, taps, channels))
    if takes and all(each is None or each.dtype is x.dtype for each in given) and is_sliced(*given):
        return kernels().causal_conv.default(x, weight, bias, state, gate, out_gate, silu)
    return causal_conv.reference(x, weight, bias, state, gate, out_gate, silu)


# A program of C++ has it inside of itself. By itself it is few numbers, for which PyTorch's functions do as well.
decay.implement("cpu", needs)(decay.reference)


@linear_attention.implement("cpu", needs)
def _linear_attention(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, skip: Tensor | None, state: Tensor | None,
    scale: float, normalise: bool, delta: bool,
) -> Any:  # fmt: skip
    (batch, _, heads, columns), (groups, width) = v.shape, k.shape[2:]
    takes = v.dtype in DTYPES and min(v.numel(), k.numel()) > 0 and q.dtype is k.dtype is v.dtype
    takes = takes and width <= MOST_KEY_WIDTH and q.shape == k.shape and k.shape[:2] == v.shape[:2]
    takes = takes and beta.shape == v.shape[:3] and decay.shape in (beta.shape, (*beta.shape, width))
    takes = takes and heads % groups == 0 and (skip is None or skip.shape == (heads,))
    takes = takes and (state is None or state.shape == (batch, heads, width, columns))
    if takes and is_whole(torch.float32, decay, beta, skip, state) and is_sliced(q, k, v):
        return kernels().linear_attention.default(q, k, v, decay, beta, skip, state, scale, normalise, delta)
    body = linear_attention.body("torch")
    return body(q, k, v, decay, beta, skip, state, scale, normalise, delta)


@gated_norm.implement("cpu", needs)
def _gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, width: int, eps: float, gate_first: bool, sigmoid: bool
) -> Any:
    columns = x.shape[-1]
    width = columns if weight is None else width
    takes = x.dtype in DTYPES and x.numel() > 0 and gate.dtype is x.dtype and x.dim() == 3 and gate.shape == x.shape
    takes = takes and width > 0 and columns % width == 0 and is_whole(x.dtype, x, weight) and is_sliced(gate)
    takes = takes and (weight is None or weight.shape in ((width,), (columns,)))
    # Its tokens lie at one distance: rows of one batch row, or all of them.
    if takes and (gate.shape[0] == 1 or gate.stride(0) == gate.stride(1) * gate.shape[1]):
        return kernels().gated_norm.default(x, gate, weight, width, eps, gate_first, sigmoid)
    return gated_norm.reference(x, gate, weight, width, eps, gate_first, sigmoid)
