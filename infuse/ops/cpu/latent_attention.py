"""Attention over latents of ops/latent_attention.py in C++ (src/latent.h).

The kernel takes up to MOST_ROWS rows, which are the heads of all tokens, and returns None for unsupported arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infuse.native import kernels, needs
from infuse.ops.latent_attention import latent_attention

MOST_ROWS = 512  # kMaxRows in src/binding_attention.cpp


@latent_attention.implement("cpu", needs)
def _latent_attention(
    q: Tensor, turned: Tensor, latents: Tensor, keys: Tensor, expand: Tensor, mask: Tensor | None, scale: float,
    causal: bool,
) -> Any:  # fmt: skip
    tokens, at_once = q.shape[1], max(MOST_ROWS // q.shape[2], 1)
    if tokens > at_once:
        return _in_turns(at_once, q, turned, latents, keys, expand, mask, scale, causal)
    out = kernels().latent_attention.default(q, turned, latents, keys, expand, mask, scale, causal)
    return latent_attention.body("torch")(q, turned, latents, keys, expand, mask, scale, causal) if out is None else out


def _in_turns(
    at_once: int, q: Tensor, turned: Tensor, latents: Tensor, keys: Tensor, expand: Tensor, mask: Tensor | None,
    scale: float, causal: bool,
) -> Tensor:  # fmt: skip
    """Attend with some tokens after others; in causal order, these do not see the keys after them."""
    tokens, length = q.shape[1], latents.shape[1]
    made = []
    for start in range(0, tokens, at_once):
        end = min(start + at_once, tokens)
        seen = length - (tokens - end) if causal else length
        of_these = mask if mask is None or mask.shape[-2] == 1 else mask[..., start:end, :]
        if of_these is not None and of_these.shape[-1] != 1:
            of_these = of_these[..., :seen]
        made.append(
            _latent_attention(
                q[:, start:end],
                turned[:, start:end],
                latents[:, :seen],
                keys[:, :seen],
                expand,
                of_these,
                scale,
                causal,
            )
        )
    return torch.cat(made, dim=1)
