"""The next token of ops/sampling.py in Triton (kernels/sampling.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infuse.ops.sampling import argmax, sample
from infuse.ops.triton import DTYPES, kernels, needs
from infuse.ops.triton.configurations import ARGMAX_SHARE, SAMPLED_BLOCK, power_above


@argmax.implement("triton", needs)
def _argmax(logits: Tensor) -> Any:
    rows, vocabulary = logits.shape
    if vocabulary == 0 or logits.dtype not in DTYPES or logits.stride(1) != 1 or rows > 65535:
        return argmax.reference(logits)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        parts = -(-vocabulary // ARGMAX_SHARE)
        found = torch.empty(rows, parts, dtype=torch.int64, device=logits.device)
        kernels("sampling").largest_of_part[(parts, rows)](
            logits, found, logits.stride(0), vocabulary, ARGMAX_SHARE, BLOCK=min(ARGMAX_SHARE, 1024), num_warps=4
        )  # fmt: skip
        kernels("sampling").largest[(rows,)](found, out, parts, PARTS=power_above(parts), num_warps=1)
    return out


@sample.implement("triton", needs)
def _sample(logits: Tensor, uniform: Tensor, temperature: float, top_k: int, top_p: float) -> Any:
    rows, vocabulary = logits.shape
    if vocabulary == 0 or logits.dtype not in DTYPES or logits.stride(1) != 1:
        return sample.reference(logits, uniform, temperature, top_k, top_p)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        block = min(power_above(vocabulary), SAMPLED_BLOCK)
        kernels("sampling").sample_row[(rows,)](
            logits, uniform.contiguous(), out, logits.stride(0), vocabulary, temperature, top_k, top_p, TOP_K=0 < top_k < vocabulary,
            TOP_P=top_p < 1, BLOCK=block, num_warps=max(block // 128, 1),
        )  # fmt: skip
    return out
