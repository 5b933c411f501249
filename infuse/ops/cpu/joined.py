"""The op of ops/joined.py in C++ (src/joined.h): one pass over both sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infuse.native import DTYPES, kernels, needs
from infuse.ops.joined import joined_heads


@joined_heads.implement("cpu", needs)
def _joined_heads(
    first: Tensor, second: Tensor | None, first_q: Tensor | None, first_k: Tensor | None, second_q: Tensor | None,
    second_k: Tensor | None, cos: Tensor | None, sin: Tensor | None, eps: float,
) -> Any:  # fmt: skip
    weights, cos_sin = (first_q, first_k, second_q, second_k), (cos, sin)
    if _takes(first, second, weights, cos_sin):
        return kernels().joined_heads.default(first, second, *weights, *cos_sin, eps)
    return joined_heads.reference(first, second, *weights, *cos_sin, eps)


def _takes(first: Tensor, second: Tensor | None, weights: tuple, cos_sin: tuple) -> bool:
    """Whether the kernel supports these: contiguous and of one dtype, cos and sin float32 for every token."""
    dtype, width = first.dtype, first.shape[-1]
    tensors = [first, *(tensor for tensor in (second, *weights) if tensor is not None)]
    if dtype not in DTYPES or any(tensor.dtype is not dtype or not tensor.is_contiguous() for tensor in tensors):
        return False
    tokens = first.shape[1] + (0 if second is None else second.shape[1])
    turned = [tensor for tensor in cos_sin if tensor is not None]
    return not turned or (
        width % 2 == 0
        and len(turned) == 2
        and all(
            tensor.dtype is torch.float32 and tensor.shape == (tokens, width) and tensor.is_contiguous()
            for tensor in turned
        )
    )
