"""Rotary position embedding, alone or fused with the append to a cache.

Suffixes: B batch, T new tokens, N all heads in one matrix (H query + K key + K value), D head width,
S capacity of the cache, E rotated width (the first E of D; cos and sin have E columns each).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from infuse.ground.modes import kept
from infuse.ops.cache_rows import SCALE_BYTES, quantize_rows
from infuse.ops.op import Case, op


@op("rotary(Tensor x, Tensor cos, Tensor sin, bool interleaved) -> Tensor")
def rotary(x_BTND: Tensor, cos_BTE: Tensor, sin_BTE: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first E of D in pairs: (i, i + E/2), or (2i, 2i + 1) if interleaved (Su et al. 2021, RoFormer).

    `cos` and `sin` hold E columns in the order of the pairing; if their batch axis is 1, they broadcast over the batch.
    """
    width = cos_BTE.shape[-1]
    cos, sin = cos_BTE.unsqueeze(-2), sin_BTE.unsqueeze(-2)
    turned = x_BTND if width == x_BTND.shape[-1] else x_BTND[..., :width]
    if interleaved:
        half = torch.stack((-turned[..., 1::2], turned[..., ::2]), dim=-1).flatten(-2)
    else:
        half = torch.cat((-turned[..., width // 2 :], turned[..., : width // 2]), dim=-1)
    out = turned * cos + half * sin
    out = out.to(x_BTND.dtype)
    return out if turned is x_BTND else torch.cat((out, x_BTND[..., width:]), dim=-1)


@op(
    "rotary_append(Tensor qkv, Tensor? cos, Tensor? sin, Tensor(a!) keys, Tensor(b!) values, SymInt start, int heads,"
    " bool interleaved) -> Tensor"
)
def rotary_append(
    qkv_BTND: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    keys_BKSD: Tensor,
    values_BKSD: Tensor,
    start: int | Tensor,
    heads: int,
    interleaved: bool,
) -> Tensor:
    """Rotate queries and keys, write keys and values to the cache at [start, start + T).

    Into a cache of int8, keys and values are written as rows of ops/cache_rows.py.
    Returns the queries [B, H, T, D]. Without cos and sin nothing is rotated. The cache must have room: start + T <= S.
    A body called directly, not through the registered op, also takes `start` as an int64 tensor with one element on the
    cache's device; it is not read on the host.
    """
    kv_heads = keys_BKSD.shape[1]
    qk, v_BTKD = qkv_BTND.split((heads + kv_heads, kv_heads), dim=2)
    if cos is not None and sin is not None:
        qk = rotary.reference(qk, cos, sin, interleaved)
    q_BTHD, k_BTKD = qk.split((heads, kv_heads), dim=2)
    _write(keys_BKSD, k_BTKD.transpose(1, 2), start)
    _write(values_BKSD, v_BTKD.transpose(1, 2), start)
    # A registered op must not return a view of its input.
    return q_BTHD.transpose(1, 2).contiguous()


def _write(storage_BKSD: Tensor, rows_BKTD: Tensor, start: int | Tensor) -> None:
    tokens = rows_BKTD.shape[2]
    if storage_BKSD.dtype == torch.int8:
        rows_BKTD = quantize_rows(rows_BKTD)
    if isinstance(start, Tensor):
        places = start.view(1) + torch.arange(tokens, device=start.device)
        storage_BKSD.index_copy_(2, places, rows_BKTD.to(storage_BKSD.dtype))
    else:
        storage_BKSD.narrow(2, start, tokens).copy_(rows_BKTD)


@rotary.implement("torch")
def _rotary_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The reference in fewer calls if the pairs are (i, i + E/2) and E is D; else the reference."""
    if interleaved or cos.shape[-1] != x.shape[-1] or cos.dtype != x.dtype:
        return rotary.reference(x, cos, sin, interleaved)
    width = x.shape[-1]
    signed = (sin * _signs(width, sin.dtype, sin.device)).unsqueeze(-2)
    return torch.addcmul(x * cos.unsqueeze(-2), x.roll(width // 2, -1), signed)


@kept
def _signs(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """-1 for the first half of the columns, 1 for the second."""
    signs = torch.ones(width, dtype=dtype, device=device)
    signs[: width // 2] = -1
    return signs


@rotary_append.implement("torch")
def _rotary_append_torch(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    keys: Tensor,
    values: Tensor,
    start: int | Tensor,
    heads: int,
    interleaved: bool,
) -> Tensor:
    """The reference without its last copy: a body called directly may return a view."""
    kv_heads, turned = keys.shape[1], qkv
    if cos is not None and sin is not None:
        turned = _rotary_torch(qkv.narrow(2, 0, heads + kv_heads), cos, sin, interleaved)
    turned = turned.transpose(1, 2)
    _write(keys, turned.narrow(1, heads, kv_heads), start)
    _write(values, qkv.narrow(2, heads + kv_heads, kv_heads).transpose(1, 2), start)
    return turned.narrow(1, 0, heads)


@rotary.fake
def _rotary_fake(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@rotary_append.fake
def _append_fake(
    qkv: Tensor, cos: Any, sin: Any, keys: Tensor, values: Tensor, start: Any, heads: int, *_: Any
) -> Tensor:
    return qkv.new_empty(qkv.shape[0], heads, qkv.shape[1], qkv.shape[3])


def _cos_sin(batch: int, tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    angles = torch.rand(batch, tokens, width, device=device) * 6.28
    return angles.cos().to(dtype), angles.sin().to(dtype)


@rotary.cases
def _rotary_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    sizes = ((1, 1, 4, 16, 16), (2, 5, 3, 24, 8), (3, 0, 2, 8, 8), (1, 7, 1, 64, 64))
    for batch, tokens, heads, width, turned in sizes:
        x = torch.randn(batch, tokens, heads, width, dtype=dtype, device=device)
        for interleaved in (False, True):
            cos, sin = _cos_sin(1 if batch == 2 else batch, tokens, turned, dtype, device)
            yield Case(f"{tuple(x.shape)} of {turned} {interleaved=}", (x, cos, sin, interleaved))


@rotary_append.cases
def _append_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for batch, tokens, heads, kv_heads, width, start in ((1, 1, 4, 2, 16, 3), (2, 5, 3, 3, 24, 0), (2, 2, 4, 1, 8, 9)):
        qkv = torch.randn(batch, tokens, heads + 2 * kv_heads, width, dtype=dtype, device=device)
        keys, values = (torch.randn(batch, kv_heads, 16, width, dtype=dtype, device=device) for _ in range(2))
        cos, sin = _cos_sin(batch, tokens, width, dtype, device)
        for what, cos_sin in (("halves", (cos, sin)), ("pairs", (cos, sin)), ("plain", (None, None))):
            args = (qkv, *cos_sin, keys.clone(), values.clone(), start, heads, what == "pairs")
            yield Case(f"{tuple(qkv.shape)} at {start} {what}", args)
        rows = (torch.zeros(batch, kv_heads, 16, width + SCALE_BYTES, dtype=torch.int8, device=device) for _ in "kv")
        yield Case(f"{tuple(qkv.shape)} at {start} int8", (qkv, None, None, *rows, start, heads, False))
