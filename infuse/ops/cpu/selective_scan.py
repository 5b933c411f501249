"""The selective scan in C++ (src/selective_scan.h)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infuse.native import DTYPES, kernels, needs
from infuse.ops.cpu.recurrence import is_sliced, is_whole
from infuse.ops.selective_scan import selective_scan

MOST_STATES = 256  # kMostStates in src/recurrence_kernels.h


@selective_scan.implement("cpu", needs)
def _selective_scan(
    x: Tensor, dt: Tensor, keys: Tensor, queries: Tensor, gate: Tensor | None, a_log: Tensor, dt_bias: Tensor,
    skip: Tensor, state: Tensor | None,
) -> Any:  # fmt: skip
    (batch, tokens, channels), states = x.shape, keys.shape[-1]
    wide, narrow = (x, dt) if gate is None else (x, dt, gate), (keys, queries)
    takes = x.dtype in DTYPES and x.numel() > 0 and 0 < states <= MOST_STATES
    takes = takes and all(each.dtype is x.dtype for each in (*wide, *narrow))
    takes = takes and all(each.shape == x.shape for each in wide)
    takes = takes and all(each.shape == (batch, tokens, states) for each in narrow)
    takes = takes and a_log.shape == (channels, states) and dt_bias.shape == skip.shape == (channels,)
    takes = takes and a_log.dtype in (x.dtype, torch.float32) and is_whole(a_log.dtype, a_log, dt_bias, skip)
    takes = takes and (state is None or state.shape == (batch, channels, states)) and is_whole(torch.float32, state)
    if takes and is_sliced(*wide, *narrow):
        return kernels().selective_scan.default(x, dt, keys, queries, gate, a_log, dt_bias, skip, state)
    body = selective_scan.body("torch")
    return body(x, dt, keys, queries, gate, a_log, dt_bias, skip, state)
