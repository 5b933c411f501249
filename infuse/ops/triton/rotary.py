"""The rotary embedding and the append of ops/rotary.py in Triton (kernels/rotary.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infuse.ops.rotary import rotary, rotary_append
from infuse.ops.triton import kernels, needs
from infuse.ops.triton.configurations import power_above, rows_at_once


def _turn_strides(cos: Tensor, sin: Tensor, batch: int) -> tuple[Tensor, Tensor, int, int]:
    """cos and sin in one layout, and their strides along batch (0 if shared by the whole batch) and tokens."""
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, cos.stride(0) if cos.shape[0] == batch and batch > 1 else 0, cos.stride(1)


@rotary.implement("triton", needs)
def _rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Any:
    if x.stride(-1) != 1:
        x = x.contiguous()
    batch, tokens, heads, width = x.shape
    out = x.new_empty(x.shape)
    if out.numel():
        cos, sin, by_batch, by_token = _turn_strides(cos, sin, batch)
        tile = rows_at_once(width)
        kernels("rotary").rotate[(batch * tokens, -(-heads // tile))](
            x, cos, sin, out, tokens, heads, width, cos.shape[-1], x.stride(0), x.stride(1), x.stride(2),
            by_batch, by_token, INTERLEAVED=interleaved, HEADS=tile, WIDTH=power_above(width), num_warps=4,
        )  # fmt: skip
    return out


@rotary_append.implement("triton", needs)
def _rotary_append(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    keys: Tensor,
    values: Tensor,
    start: int | Tensor,
    heads: int,
    interleaved: bool,
) -> Any:
    """Reads a tensor `start` on the device; keys and values beyond the capacity are then not written."""
    if qkv.stride(-1) != 1:
        qkv = qkv.contiguous()
    (batch, tokens, all_heads, width), kv_heads, capacity = qkv.shape, keys.shape[1], keys.shape[2]
    if not isinstance(start, Tensor) and start + tokens > capacity:
        raise IndexError(f"{tokens} tokens at {start} do not fit a cache of {capacity}")
    if keys.stride(-1) != 1 or values.stride(-1) != 1 or keys.dtype == torch.int8:
        return rotary_append.body("torch")(qkv, cos, sin, keys, values, start, heads, interleaved)
    out = qkv.new_empty(batch, heads, tokens, width)
    if batch * tokens * width == 0:
        return out
    by_batch = by_token = 0
    if cos is not None and sin is not None:
        cos, sin, by_batch, by_token = _turn_strides(cos, sin, batch)
    tile = rows_at_once(width)
    kernels("rotary").rotate_append[(batch * tokens, -(-all_heads // tile))](
        qkv, cos, sin, keys, values, out, start, tokens, heads, kv_heads, width,
        0 if cos is None else cos.shape[-1], capacity,
        *qkv.stride()[:3], by_batch, by_token, *keys.stride()[:3], *values.stride()[:3],
        INTERLEAVED=interleaved, START_IS_THERE=isinstance(start, Tensor), HEADS=tile, WIDTH=power_above(width),
        num_warps=4,
    )  # fmt: skip
    return out
