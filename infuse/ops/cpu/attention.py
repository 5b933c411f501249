"""The attention of ops/attention.py in C++.

Few queries over a cache use src/attention.h, many queries src/attention_tiles.h. For heads that are too wide, the
kernel returns None and PyTorch's fused attention runs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from infuse.native import kernels, needs
from infuse.ops.attention import attention, cut


@attention.implement("cpu", needs)
def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float, causal: bool, window: int,
    softcap: float, sinks: Tensor | None = None, length: Tensor | None = None,
) -> Any:  # fmt: skip
    if length is not None:
        k, v, mask, bias = cut(k, v, mask, bias, int(length))
    out = kernels().attention.default(q, k, v, mask, bias, scale, causal, window, softcap, sinks)
    if out is None:
        return attention.body("torch")(q, k, v, mask, bias, scale, causal, window, softcap, sinks)
    return out
