"""The selective scan in C++ (src/selective_scan.h)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infuse.native import DTYPES, kernels, needs
from infuse.ops.cpu.recurrence import is_sliced, is_whole
from infuse.ops.selective_scan import are_alike, selective_scan

MOST_STATES = 256  # kMostStates in src/recurrence_kernels.h


@selective_scan.implement("cpu", needs)
def _selective_scan(
    x: Tensor, dt: Tensor, keys: Tensor, queries: Tensor, gate: Tensor | None, a_log: Tensor, dt_bias: Tensor,
    skip: Tensor, state: Tensor | None,
) -> Any:  # fmt: skip
    given = x, dt, keys, queries, gate, a_log, dt_bias, skip, state
    takes = x.dtype in DTYPES and x.numel() > 0 and 0 < keys.shape[-1] <= MOST_STATES and are_alike(*given)
    takes = takes and a_log.dtype in (x.dtype, torch.float32) and is_whole(a_log.dtype, a_log, dt_bias, skip)
    if takes and is_whole(torch.float32, state) and is_sliced(x, dt, keys, queries, gate):
        return kernels().selective_scan.default(*given)
    return selective_scan.body("torch")(*given)
