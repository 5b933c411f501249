"""The ops of recurrent mixers in Triton (kernels/recurrence.py): causal_conv, decay, linear_attention, gated_norm.

Linear attention goes token by token inside of the kernel, also for prompts. Products of chunks would need tensor cores
to gain anything: in exact float32 they multiply as often, and a tile of 16 tokens by a state of 128 x 32 spills 4 kB of
registers in each thread (compiled for Hopper), where the state alone needs none.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from infuse.ops.causal_conv import causal_conv
from infuse.ops.decay import decay
from infuse.ops.gated_norm import gated_norm
from infuse.ops.recurrence import linear_attention
from infuse.ops.triton import DTYPES, kernels, needs
from infuse.ops.triton.configurations import (
    CONV_CHANNELS,
    CONV_TOKENS,
    LARGEST_STATE_WIDTH,
    power_above,
    row_warps,
    rows_at_once,
    scan_tiles,
)
from infuse.ops.triton.norm import LARGEST_WIDTH

MOST_TAPS = 16  # the kernel's loop over them is unrolled


def with_columns(x: Tensor) -> Tensor:
    """x with its last axis contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


@causal_conv.implement("triton", needs)
def _causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, gate: Tensor | None, out_gate: Tensor | None,
    silu: bool,
) -> Any:  # fmt: skip
    batch, tokens, channels = x.shape
    taps = weight.shape[1]
    takes = x.dtype in DTYPES and x.numel() > 0 and weight.shape[0] == channels and 0 < taps <= MOST_TAPS
    takes = takes and all(each is None or each.shape == x.shape for each in (gate, out_gate))
    takes = takes and all(each is None or each.dtype is x.dtype for each in (state, gate, out_gate))
    takes = takes and (state is None or state.shape == (batch, taps, channels))
    if not takes or (bias is not None and bias.shape != (channels,)):
        return causal_conv.reference(x, weight, bias, state, gate, out_gate, silu)
    x, weight = with_columns(x), weight.contiguous()
    gate, out_gate = (None if each is None else with_columns(each) for each in (gate, out_gate))
    bias, state = (None if each is None else each.contiguous() for each in (bias, state))
    strides = [(0, 0) if each is None else each.stride()[:2] for each in (x, gate, out_gate)]
    y, after = x.new_empty(x.shape), x.new_empty(batch, taps, channels)
    along, across = min(power_above(tokens), CONV_TOKENS), min(power_above(channels), CONV_CHANNELS)
    tiles = -(-tokens // along)
    kernels("recurrence").convolve[(batch * tiles, -(-channels // across))](
        x, weight, bias, state, gate, out_gate, y, after, tokens, channels, tiles, *strides[0], *strides[1],
        *strides[2], SILU=silu, TAPS=taps, TOKENS=along, CHANNELS=across,
        num_warps=min(max(along * across // 256, 1), 4),
    )  # fmt: skip
    return y, after


@decay.implement("triton", needs)
def _decay(
    step: Tensor, beta: Tensor | None, a_log: Tensor, dt_bias: Tensor, least: float, most: float, factor: float
) -> Any:
    heads = step.shape[-1]
    takes = step.dtype in DTYPES and step.dim() == 3 and step.numel() > 0 and heads <= LARGEST_WIDTH
    takes = takes and (beta is None or (beta.shape == step.shape and beta.dtype is step.dtype))
    if not takes or (heads,) != a_log.shape or a_log.shape != dt_bias.shape:
        return decay.reference(step, beta, a_log, dt_bias, least, most, factor)
    step, beta = with_columns(step), None if beta is None else with_columns(beta)
    a_log, dt_bias = a_log.contiguous(), dt_bias.contiguous()
    out, taken = (torch.empty(step.shape, dtype=torch.float32, device=step.device) for _ in range(2))
    rows = step.numel() // heads
    many = min(rows_at_once(heads), power_above(rows))
    kernels("recurrence").decays[(-(-rows // many),)](
        step, beta, a_log, dt_bias, out, taken, rows, step.shape[1], heads, least, most, factor, *step.stride()[:2],
        *((0, 0) if beta is None else beta.stride()[:2]), LIMITED=(least, most) != (0.0, math.inf), ROWS=many,
        BLOCK=power_above(heads), num_warps=row_warps(heads * many),
    )  # fmt: skip
    return out, taken


@linear_attention.implement("triton", needs)
def _linear_attention(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, skip: Tensor | None, state: Tensor | None,
    scale: float, normalise: bool, delta: bool,
) -> Any:  # fmt: skip
    batch, tokens, heads, columns = v.shape
    groups, width = k.shape[2:]
    takes = v.dtype in DTYPES and min(v.numel(), k.numel()) > 0 and width <= LARGEST_STATE_WIDTH
    takes = takes and q.shape == k.shape and k.shape[:2] == v.shape[:2] and heads % groups == 0
    takes = takes and beta.shape == v.shape[:3] and decay.shape in (beta.shape, (*beta.shape, width))
    takes = takes and (state is None or state.shape == (batch, heads, width, columns))
    if not takes or (skip is not None and skip.shape != (heads,)):
        body = linear_attention.body("torch")
        return body(q, k, v, decay, beta, skip, state, scale, normalise, delta)
    q, k, v = (with_columns(each) for each in (q, k, v))
    decay, beta = decay.contiguous(), beta.contiguous()
    skip, state = (None if each is None else each.contiguous() for each in (skip, state))
    out, after = v.new_empty(v.shape), v.new_empty(batch, heads, width, columns, dtype=torch.float32)
    tiles = scan_tiles(width, columns, tokens)
    kernels("recurrence").scan_tokens[(batch * heads * -(-columns // tiles.columns),)](
        q, k, v, decay, beta, skip, state, out, after, tokens, heads, heads // groups, columns, scale,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], NORMALISE=normalise, DELTA=delta,
        BY_CHANNEL=decay.dim() == 4, WIDTH=width, PADDED=power_above(width), COLUMNS=tiles.columns,
        num_warps=tiles.warps,
    )  # fmt: skip
    return out, after


@gated_norm.implement("triton", needs)
def _gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, width: int, eps: float, gate_first: bool, sigmoid: bool
) -> Any:
    columns = x.shape[-1]
    width = columns if weight is None else width
    takes = x.dtype in DTYPES and x.numel() > 0 and x.dim() == 3 and gate.shape == x.shape
    takes = takes and 0 < width <= LARGEST_WIDTH and columns % width == 0
    if not takes or (weight is not None and weight.shape not in ((width,), (columns,))):
        return gated_norm.reference(x, gate, weight, width, eps, gate_first, sigmoid)
    x, gate, weight = x.contiguous(), with_columns(gate), None if weight is None else weight.contiguous()
    out, rows = torch.empty_like(x), x.numel() // width
    many = min(rows_at_once(width), power_above(rows))
    kernels("recurrence").gated_norm_rows[(-(-rows // many),)](
        x, gate, weight, out, rows, x.shape[1], columns // width, width,
        1 if weight is None else weight.numel() // width, *gate.stride()[:2], eps, GATE_FIRST=gate_first,
        SIGMOID=sigmoid, ROWS=many, BLOCK=power_above(width), num_warps=row_warps(width * many),
    )  # fmt: skip
    return out
