"""The attention of ops/attention.py in Triton (kernels/attention.py).

It runs few queries over a cache. It runs many queries only with a soft cap or sinks, which PyTorch's fused attention
lacks, or with a bias or window, which PyTorch would need as a mask for each query and key.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infuse.ops.attention import attention
from infuse.ops.cache_rows import SCALE_BYTES, scales_in
from infuse.ops.triton import DTYPES, kernels, needs
from infuse.ops.triton.configurations import attention_tiles, power_above

MOST_FEW = 16  # queries
NO_STRIDES = (0, 0, 0, 0)


@attention.implement("triton", needs)
def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float, causal: bool, window: int,
    softcap: float, sinks: Tensor | None = None, length: Tensor | None = None,
) -> Any:  # fmt: skip
    """Reads `length` on the device, and rows of an int8 cache as they are, if their scales are at multiples of 4 bytes.

    A fully masked row is zeros, also with an additive mask of -inf.
    """
    batch, heads, tokens, width = q.shape
    of_int8 = k.dtype == v.dtype == torch.int8
    scales = (scales_in(k), scales_in(v)) if of_int8 else (None, None)
    kv_heads, keys, value_width = k.shape[1], k.shape[2], v.shape[3] - (SCALE_BYTES if of_int8 else 0)
    ours = length is not None or tokens <= MOST_FEW or softcap > 0 or bias is not None or sinks is not None
    ours = ours or (window > 0 and mask is None)
    alike = None not in scales if of_int8 else q.dtype == k.dtype == v.dtype
    alike = alike and q.dtype in DTYPES and batch * kv_heads <= 65535
    if not ours or not alike or max(width, value_width) > 256 or min(batch, tokens, keys, value_width) == 0:
        return attention.body("torch")(q, k, v, mask, bias, scale, causal, window, softcap, sinks, length)
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    bias, mask = (None if t is None else t.expand(batch, heads, tokens, keys) for t in (bias, mask))
    is_bool = mask is not None and mask.dtype == torch.bool
    if is_bool and mask is not None:
        mask = mask.view(torch.uint8)
    group = heads // kv_heads
    row_bytes, masked = power_above(max(width, value_width)) * q.element_size(), mask is not None or bias is not None
    chosen = attention_tiles(tokens * group, batch * kv_heads, keys, row_bytes, masked)
    out = q.new_empty(batch, tokens, heads, value_width)
    rows, parts, sums = batch * tokens * heads, out, None
    if chosen.splits > 1:
        parts = q.new_empty(chosen.splits, rows, value_width, dtype=torch.float32)
        sums = q.new_empty(chosen.splits, rows, 2, dtype=torch.float32)
    padded = max(power_above(value_width), 16)
    kernels("attention").attend[(-(-tokens * group // chosen.rows), batch * kv_heads, chosen.splits)](
        q, k, v, *scales, mask, bias, sinks, parts, sums, keys if length is None else length,
        tokens, kv_heads, width, value_width, scale, window, softcap,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *(NO_STRIDES if mask is None else mask.stride()),
        *(NO_STRIDES if bias is None else bias.stride()),
        CAUSAL=causal, WINDOWED=window > 0, CAPPED=softcap > 0, MASK_IS_BOOL=is_bool,
        LENGTH_IS_THERE=length is not None, GROUP=group, ROWS=chosen.rows, KEYS=chosen.keys,
        WIDTH=max(power_above(width), 16), VALUE_WIDTH=padded, SPLITS=chosen.splits,
        num_warps=chosen.warps, num_stages=chosen.stages,
    )  # fmt: skip
    if chosen.splits > 1:
        kernels("attention").combine_splits[(rows,)](
            parts, sums, sinks, out, rows, heads, value_width, VALUE_WIDTH=padded, SPLITS=chosen.splits,
            num_warps=1 if padded <= 64 else 2,
        )  # fmt: skip
    return out
