"""The op of ops/joined.py in Triton (kernels/joined.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infuse.ops.joined import joined_heads
from infuse.ops.triton import kernels, needs
from infuse.ops.triton.configurations import power_above, rows_at_once


@joined_heads.implement("triton", needs)
def _joined_heads(
    first: Tensor, second: Tensor | None, first_q: Tensor | None, first_k: Tensor | None, second_q: Tensor | None,
    second_k: Tensor | None, cos: Tensor | None, sin: Tensor | None, eps: float,
) -> Any:  # fmt: skip
    cos_sin = [table for table in (cos, sin) if table is not None]
    if first.shape[-1] % 2 or len(cos_sin) == 1 or any(table.dtype != torch.float32 for table in cos_sin):
        return joined_heads.reference(first, second, first_q, first_k, second_q, second_k, cos, sin, eps)
    cos, sin = cos_sin[0].contiguous() if cos_sin else None, cos_sin[1].contiguous() if cos_sin else None
    batch, tokens, heads, width = first.shape
    whole = tokens + (0 if second is None else second.shape[1])
    out, start, tile = first.new_empty(batch, whole, heads, width), 0, rows_at_once(width)
    for x, q, k in ((first, first_q, first_k), (second, second_q, second_k)):
        if x is None or not x.numel():
            continue
        kernels("joined").join_heads[(batch * x.shape[1], -(-heads // tile))](
            x.contiguous(), q, k, cos, sin, out, x.shape[1], start, whole, heads // 3, width, eps, HEADS=tile,
            WIDTH=power_above(width), num_warps=4,
        )  # fmt: skip
        start += x.shape[1]
    return out
