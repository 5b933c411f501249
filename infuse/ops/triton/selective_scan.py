"""The selective scan in Triton (kernels/selective_scan.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infuse.ops.selective_scan import are_alike, selective_scan
from infuse.ops.triton import DTYPES, kernels, needs
from infuse.ops.triton.configurations import SCANNED_CHANNELS, power_above, scan_warps
from infuse.ops.triton.recurrence import with_columns

MOST_STATES = 256


@selective_scan.implement("triton", needs)
def _selective_scan(
    x: Tensor, dt: Tensor, keys: Tensor, queries: Tensor, gate: Tensor | None, a_log: Tensor, dt_bias: Tensor,
    skip: Tensor, state: Tensor | None,
) -> Any:  # fmt: skip
    given = x, dt, keys, queries, gate, a_log, dt_bias, skip, state
    (batch, tokens, channels), states = x.shape, keys.shape[-1]
    if x.dtype not in DTYPES or not x.numel() or not 0 < states <= MOST_STATES or not are_alike(*given):
        return selective_scan.body("torch")(*given)
    x, dt, keys, queries = (with_columns(each) for each in (x, dt, keys, queries))
    gate = None if gate is None else with_columns(gate)
    a_log, dt_bias, skip = a_log.contiguous(), dt_bias.contiguous(), skip.contiguous()
    state = None if state is None else state.contiguous()
    y, after = x.new_empty(x.shape), x.new_empty(batch, channels, states, dtype=torch.float32)
    padded, across = power_above(states), min(power_above(channels), SCANNED_CHANNELS)
    kernels("selective_scan").scan_channels[(batch * -(-channels // across),)](
        x, dt, keys, queries, gate, a_log, dt_bias, skip, state, y, after, tokens, channels, *x.stride()[:2],
        *dt.stride()[:2], *keys.stride()[:2], *queries.stride()[:2], *((0, 0) if gate is None else gate.stride()[:2]),
        STATES=states, PADDED=padded, CHANNELS=across, num_warps=scan_warps(padded * across),
    )  # fmt: skip
    return y, after
