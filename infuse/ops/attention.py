"""Attention of new queries over keys and values; with a cache there are more keys than queries.

Suffixes: B batch, H query heads, K key/value heads (H a multiple of K), T queries, L keys, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from infuse.ops.cache_rows import quantize_rows, values_of
from infuse.ops.op import Case, op


def attention_weights(
    q_BHTD: Tensor, k_BKLD: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float, causal: bool, window: int,
    softcap: float, sinks_H: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """softmax of scale * q k^T, then soft-capped, biased and masked: [B, H, T, L] in float32.

    `sinks`: one more logit for each head, of any floating dtype, that joins the softmax and attends to nothing, so that
    the weights of a row add up to less than 1.
    A row whose keys are all masked is all zeros. `mask` is bool (True: attend) or additive, broadcastable to
    [B, H, T, L]; `bias` is additive (ALiBi). `causal` aligns the last query with the last key. `window` > 0 hides keys
    that are `window` or more positions before the query. `softcap` > 0 squashes scores to (-softcap, softcap) by tanh.
    """
    groups = q_BHTD.shape[1] // k_BKLD.shape[1]
    keys = values_of(k_BKLD)
    keys = keys.repeat_interleave(groups, dim=1) if groups > 1 else keys
    scores = (q_BHTD.float() @ keys.float().transpose(-1, -2)) * scale
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias.float()
    return weights_of_scores(scores, mask, causal, window, sinks_H)


def weights_of_scores(
    scores: Tensor, mask: Tensor | None, causal: bool, window: int = 0, sinks_H: Tensor | None = None
) -> Tensor:
    """softmax of the scores [B, H, T, L] in float32, masked as in `attention_weights`."""
    allowed = _allowed(scores.shape[2], scores.shape[3], causal, window, scores.device)
    if mask is not None and mask.dtype == torch.bool:
        allowed = mask if allowed is None else allowed & mask
    elif mask is not None:
        scores = scores + mask.float()
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    if sinks_H is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        sinks = sinks_H.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]
    # softmax turns a row of -inf only into NaN
    return weights if allowed is None else weights.masked_fill(~allowed, 0.0)


def _allowed(tokens: int, length: int, causal: bool, window: int, device: torch.device) -> Tensor | None:
    """The [T, L] mask of the causal order and the window, or None if neither hides a key."""
    if not window and (not causal or tokens == 1):
        return None
    query = torch.arange(length - tokens, length, device=device)[:, None]
    key = torch.arange(length, device=device)
    allowed = key <= query if causal else torch.ones(tokens, length, dtype=torch.bool, device=device)
    return allowed & (key > query - window) if window else allowed


@op(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias,"
    " float scale, bool causal, int window, float softcap, Tensor? sinks=None) -> Tensor"
)
def attention(
    q_BHTD: Tensor, k_BKLD: Tensor, v_BKLD: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float,
    causal: bool, window: int, softcap: float, sinks_H: Tensor | None = None, length: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """attention_weights(...) @ v, as [B, T, H, D] in q.dtype; computed in float32.

    Keys and values may be rows of an int8 cache (ops/cache_rows.py).
    A body called directly, not through the registered op, also takes `length`, an int64 tensor with one element: only
    the first `length` of the L keys are valid. The rest are ignored, also in mask and bias. The reference and "torch"
    read `length` on the host.
    """
    if length is not None:
        k_BKLD, v_BKLD, mask, bias = cut(k_BKLD, v_BKLD, mask, bias, int(length))
    weights = attention_weights(q_BHTD, k_BKLD, mask, bias, scale, causal, window, softcap, sinks_H)
    groups = q_BHTD.shape[1] // v_BKLD.shape[1]
    values = values_of(v_BKLD)
    values = values.repeat_interleave(groups, dim=1) if groups > 1 else values
    return (weights @ values.float()).transpose(1, 2).to(q_BHTD.dtype).contiguous()


def cut(
    k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, length: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Cut keys and values to the first `length`, and mask and bias too if they have a column per key."""
    whole = k.shape[2]
    mask, bias = (t if t is None or t.shape[-1] != whole else t[..., :length] for t in (mask, bias))
    return k[:, :, :length], v[:, :, :length], mask, bias


@attention.implement("torch")
def _attention_torch(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float, causal: bool, window: int,
    softcap: float, sinks: Tensor | None = None, length: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """PyTorch's scaled_dot_product_attention; the reference for soft caps, which it does not support."""
    if length is not None:
        k, v, mask, bias = cut(k, v, mask, bias, int(length))
    k, v = values_of(k, q.dtype), values_of(v, q.dtype)
    if softcap > 0:
        return attention.reference(q, k, v, mask, bias, scale, causal, window, softcap, sinks)
    if sinks is not None:
        return _with_sink_key(q, k, v, mask, bias, scale, causal, window, sinks)
    batch, heads, tokens, width = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    # SDPA's is_causal aligns the first query with the first key, and cannot be combined with a mask.
    if window or (causal and tokens > 1 and (keys > tokens or mask is not None or bias is not None)):
        mask = both_masks(mask, _allowed(tokens, keys, causal, window, q.device), q.dtype)
        causal = False
    if bias is not None:
        mask = both_masks(bias.to(q.dtype), mask, q.dtype)
    if mask is not None and mask.dtype != torch.bool and mask.dtype != q.dtype:
        mask = mask.to(q.dtype)
    if heads != kv_heads and tokens == 1 and (mask is None or mask.shape[1] == 1):
        # One query: put the heads that share a key head on the query axis, so that nothing is repeated.
        grouped = q.reshape(batch, kv_heads, heads // kv_heads, width)
        return F.scaled_dot_product_attention(grouped, k, v, mask, scale=scale).view(batch, 1, heads, width)
    out = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal and tokens > 1, scale=scale, enable_gqa=heads != kv_heads
    )
    return out.transpose(1, 2)


def _with_sink_key(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float, causal: bool, window: int,
    sinks: Tensor,
) -> Tensor:  # fmt: skip
    """Attention with sinks by PyTorch's function: prepend a key of value zero whose score is the sink.

    Two extra columns make up that score, as a sum that is exact in 16 bits too; they are zero in all other keys.
    """
    tokens, width = q.shape[2:]
    if window or mask is not None or bias is not None or (causal and 1 < tokens < k.shape[2]):
        mask = both_masks(mask, _allowed(tokens, k.shape[2], causal, window, q.device), q.dtype)
        mask = mask if bias is None else both_masks(bias.to(q.dtype), mask, q.dtype)
        assert mask is not None
        mask = F.pad(mask.expand(*mask.shape[:-1], k.shape[2]), (1, 0), value=mask.dtype == torch.bool)
        causal = False
    more = (-width - 2) % 8 + 2  # SDPA's fast kernels want multiples of 8 columns
    first = int(causal and tokens > 1)
    q, k, v = F.pad(q, (0, more, first, 0)), F.pad(k, (0, more, 1, 0)), F.pad(v, (0, more, 1, 0))
    limits = torch.finfo(q.dtype)
    scores = (sinks.float() / scale).clamp(limits.min / 4, limits.max / 4)  # -infinity times zero is NaN
    scores = scores.masked_fill(sinks == float("inf"), float("nan"))  # as softmax gives
    q[..., -1] = scores.to(q.dtype).view(1, -1, 1)
    q[..., -2] = (scores - scores.to(q.dtype).float()).to(q.dtype).view(1, -1, 1)
    k[:, :, 0, -2:] = 1.0
    # Prepend a query too, dropped later: SDPA's causal order needs a token's query and key at the same index.
    return _attention_torch(q, k, v, mask, None, scale, causal, 0, 0.0)[:, first:, :, :width]


def both_masks(first: Tensor | None, second: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Merge two masks: bool if both are bool, else additive in `dtype`, with -inf for False.

    Attention gives zeros for a row of -inf only.
    """
    if first is None or second is None:
        return second if first is None else first
    if second.dtype == torch.bool:
        first, second = second, first
    if second.dtype == torch.bool:
        return first & second
    if first.dtype == torch.bool:
        return second.to(dtype).masked_fill(~first, float("-inf"))
    return (first.to(dtype) + second.to(dtype)).clamp(min=torch.finfo(dtype).min)


@attention.flops
def _flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: object) -> int:
    return 2 * prod(q[:3]) * k[2] * (q[3] + v[3])


@attention.fake
def _fake(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    width = q.shape[3] if v.dtype == torch.int8 else v.shape[3]
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], width)


_SIZES = ((1, 4, 4, 1, 9, 16), (2, 6, 2, 5, 5, 8), (2, 4, 1, 3, 8, 24), (1, 2, 2, 7, 7, 64))  # B, H, K, T, L, D


@attention.cases
def _cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for batch, heads, kv_heads, tokens, length, width in _SIZES:
        q = torch.randn(batch, heads, tokens, width, dtype=dtype, device=device)
        k, v = (torch.randn(batch, kv_heads, length, width, dtype=dtype, device=device) for _ in range(2))
        padded = torch.ones(batch, 1, tokens, length, dtype=torch.bool, device=device).tril(length - tokens)
        padded[0, :, :, :2] = False
        additive = torch.zeros(padded.shape, dtype=dtype, device=device).masked_fill(~padded, torch.finfo(dtype).min)
        bias = torch.randn(batch, heads, 1, length, dtype=dtype, device=device)
        label, scale = f"{batch}x{heads}/{kv_heads}x{tokens}/{length}x{width}", width**-0.5
        yield Case(f"{label} causal", (q, k, v, None, None, scale, True, 0, 0.0, None))
        yield Case(f"{label} bidirectional", (q, k, v, None, None, scale, False, 0, 0.0, None))
        yield Case(f"{label} padded", (q, k, v, padded, None, scale, False, 0, 0.0, None))
        yield Case(f"{label} additive", (q, k, v, additive[:, :, :, :], None, scale, False, 0, 0.0, None))
        yield Case(f"{label} bias", (q, k, v, padded, bias, scale, False, 0, 0.0, None))
        yield Case(f"{label} causal bias", (q, k, v, None, bias, 1.0, True, 0, 0.0, None))
        yield Case(f"{label} window", (q, k, v, None, None, scale, True, 3, 0.0, None))
        yield Case(f"{label} capped", (q, k, v, padded, None, scale, False, 0, 5.0, None))
        sinks = 2 * torch.randn(heads, dtype=dtype, device=device)
        yield Case(f"{label} sinks causal", (q, k, v, None, None, scale, True, 0, 0.0, sinks))
        yield Case(f"{label} sinks padded", (q, k, v, padded, None, scale, False, 0, 0.0, sinks.float()))
        yield Case(f"{label} sinks window bias", (q, k, v, additive, bias, scale, True, 3, 0.0, sinks))
        rows = quantize_rows(k), quantize_rows(v)
        yield Case(f"{label} int8", (q, *rows, None, None, scale, True, 0, 0.0, None))
        yield Case(f"{label} int8 padded", (q, *rows, padded, bias, scale, False, 0, 5.0, sinks))
