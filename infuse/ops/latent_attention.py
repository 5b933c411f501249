"""Attention of a few new tokens over a cache of latents, of which each head's keys and values are products.

Suffixes: B batch, T queries, L keys, H heads; widths: N plain queries and keys, E rotated ones, R latents, V values.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from infuse.ops.attention import weights_of_scores
from infuse.ops.op import Case, op


@op(
    "latent_attention(Tensor q, Tensor turned, Tensor latents, Tensor keys, Tensor expand, Tensor? mask, float scale,"
    " bool causal) -> Tensor"
)
def latent_attention(
    q_BTHN: Tensor, turned_BTHE: Tensor, latents_BLR: Tensor, keys_BLE: Tensor, expand_SR: Tensor, mask: Tensor | None,
    scale: float, causal: bool,
) -> Tensor:  # fmt: skip
    """Attend with queries [q | turned] and keys [latents · K | keys] to the values latents · V.

    `expand` [H (N + V), R] has N rows K and V rows V for each head. `mask` and `causal` are as in ops/attention.py.
    The result [B, T, H, V] is in q.dtype, computed in float32. No head's keys and values are made (DeepSeek-V2, section
    2.1.2): queries are multiplied by K, and sums of latents by V.
    """
    given = (tensor.float() for tensor in (q_BTHN, turned_BTHE, latents_BLR, keys_BLE, expand_SR))
    return _absorbed(*given, mask, scale, causal).to(q_BTHN.dtype)


@latent_attention.implement("torch")
def _absorbed(
    q_BTHN: Tensor, turned_BTHE: Tensor, latents_BLR: Tensor, keys_BLE: Tensor, expand_SR: Tensor, mask: Tensor | None,
    scale: float, causal: bool,
) -> Tensor:  # fmt: skip
    """The reference with products in the dtype of the arguments."""
    batch, tokens, heads, plain = q_BTHN.shape
    length, rank = latents_BLR.shape[1:]
    expand_HMR = expand_SR.view(heads, -1, rank)
    k_HNR, v_HVR = expand_HMR.split((plain, expand_HMR.shape[1] - plain), dim=1)
    rows_HQR = torch.bmm(q_BTHN.reshape(-1, heads, plain).transpose(0, 1), k_HNR)  # Q: B T
    rows_BSR = rows_HQR.view(heads, batch, tokens, rank).transpose(0, 1).reshape(batch, -1, rank)  # S: H T
    turned_BSE = turned_BTHE.transpose(1, 2).reshape(batch, heads * tokens, -1)
    scores = (rows_BSR @ latents_BLR.transpose(1, 2)).float() + (turned_BSE @ keys_BLE.transpose(1, 2)).float()
    weights = weights_of_scores(scores.view(batch, heads, tokens, length) * scale, mask, causal)
    summed_BSR = weights.to(q_BTHN.dtype).view(batch, -1, length) @ latents_BLR
    summed_HQR = summed_BSR.view(batch, heads, tokens, rank).transpose(0, 1).reshape(heads, -1, rank)
    out_HQV = torch.bmm(summed_HQR, v_HVR.transpose(1, 2))
    return out_HQV.view(heads, batch, tokens, -1).permute(1, 2, 0, 3).contiguous()


@latent_attention.fake
def _fake(q: Tensor, turned: Tensor, latents: Tensor, keys: Tensor, expand: Tensor, *_: object) -> Tensor:
    batch, tokens, heads, plain = q.shape
    return q.new_empty(batch, tokens, heads, expand.shape[0] // heads - plain)


# B, H, T, L, N, E, R, V
_SIZES = (
    (1, 4, 1, 9, 16, 8, 32, 16),
    (2, 3, 2, 5, 8, 4, 24, 12),
    (3, 1, 1, 3, 12, 2, 8, 4),
    (1, 5, 3, 40, 24, 8, 40, 24),
)


@latent_attention.cases
def _cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for batch, heads, tokens, length, plain, turned, rank, value in _SIZES:
        q, r, c, k = (
            torch.randn(shape, dtype=dtype, device=device)
            for shape in (
                (batch, tokens, heads, plain), (batch, tokens, heads, turned), (batch, length, rank),
                (batch, length, turned),
            )
        )  # fmt: skip
        expand = torch.randn(heads * (plain + value), rank, device=device).div(rank**0.5).to(dtype)
        padded = torch.ones(batch, 1, tokens, length, dtype=torch.bool, device=device).tril(length - tokens)
        padded[0, :, :, : length // 3] = False
        added = torch.zeros(padded.shape, dtype=dtype, device=device).masked_fill(~padded, torch.finfo(dtype).min)
        label, scale = f"{batch}x{heads}x{tokens}/{length} of {rank}", (plain + turned) ** -0.5
        yield Case(f"{label} causal", (q, r, c, k, expand, None, scale, True))
        yield Case(f"{label} bidirectional", (q, r, c, k, expand, None, scale, False))
        yield Case(f"{label} padded", (q, r, c, k, expand, padded, scale, False))
        yield Case(f"{label} padded causal", (q, r, c, k, expand, padded, scale, True))
        yield Case(f"{label} additive", (q, r, c, k, expand, added, scale, False))
