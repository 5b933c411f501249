"""Attention in C++ against its reference."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from infuse import ops
from infuse.native import kernels
from infuse.ops.cache_rows import values_of
from tests.support.tolerance import assert_near


def attended(*args: object) -> Tensor:
    """By the kernel itself, which must not decline."""
    out = kernels().attention.default(*args)
    assert out is not None
    return out


def cached(batch: int, kv_heads: int, length: int, width: int, dtype: torch.dtype) -> Tensor:
    """A view of a longer storage full of NaN beyond it: strided, and nothing past the end may be used."""
    storage = torch.full((batch, kv_heads, length + 3, width), float("nan"), dtype=dtype)
    storage[:, :, :length] = torch.randn(batch, kv_heads, length, width)
    return storage[:, :, :length]


def check(dtype: torch.dtype, *args: object) -> None:
    q, k, v = args[:3]
    assert isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    wanted = ops.attention.reference(q.float(), values_of(k).float(), values_of(v).float(), *args[3:])
    found = attended(*args)
    assert found.dtype == dtype and found.is_contiguous()
    assert_near(found, wanted, dtype, f"{tuple(q.shape)} over {tuple(k.shape)}")


def masks(batch: int, heads: int, tokens: int, length: int) -> Iterator[Tensor]:
    for shape in (
        (batch, 1, tokens, length),
        (1, heads, 1, length),
        (batch, heads, tokens, length),
        (tokens, length),
        (length,),
    ):
        yield torch.rand(shape) < 0.7
    yield (torch.rand(batch, 1, 1, length) < 0.7).expand(batch, heads, tokens, length)
    yield (torch.rand(batch, 1, tokens, 2 * length) < 0.7)[..., ::2]
    yield torch.rand(batch, 1, tokens, 1) < 0.5  # rows that see all or nothing
    yield torch.zeros(batch, 1, tokens, length, dtype=torch.bool)


def check_many_queries(width: int, dtype: torch.dtype) -> None:
    for batch, heads, kv_heads, tokens, length in (
        (2, 4, 2, 9, 9),
        (1, 8, 2, 70, 70),
        (2, 3, 3, 130, 130),
        (1, 4, 1, 40, 300),
        (1, 71, 1, 20, 20),
    ):
        q = torch.randn(batch, tokens, heads, width).to(dtype).transpose(1, 2)
        k, v = (cached(batch, kv_heads, length, width, dtype) for _ in range(2))
        for causal in (False, True):
            for window in (0, 7, 100):
                sinks = torch.linspace(-1, 3, heads) if window == 7 else None
                check(dtype, q, k, v, None, None, width**-0.5, causal, window, 0.0, sinks)


def check_tiles_with_masks(dtype: torch.dtype) -> None:
    batch, heads, kv_heads, width = 3, 4, 2, 32
    for tokens, length in ((9, 130), (40, 40), (17, 400)):
        q = torch.randn(batch, heads, tokens, width).to(dtype)
        k, v = (cached(batch, kv_heads, length, width, dtype) for _ in range(2))
        bias = torch.randn(1, heads, 1, length).to(dtype)
        for mask in masks(batch, heads, tokens, length):
            check(dtype, q, k, v, mask, None, 0.2, False, 0, 0.0)
            check(dtype, q, k, v, mask, bias, 0.2, True, 7, 3.0)
            added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
            check(dtype, q, k, v, added, None, 0.2, False, 0, 0.0)
            mask = mask.clone()
            mask[..., 0] = True  # a row of -infinity alone is NaN for the reference, zeros here
            hidden = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
            check(dtype, q, k, v, hidden, None, 0.2, False, 0, 0.0)


def check_not_finite_tiles(value: float, dtype: torch.dtype) -> None:
    for which in range(3):
        for place in (0, 70, 199):
            args = [torch.randn(2, heads, tokens, 32).to(dtype) for heads, tokens in ((4, 20), (2, 200), (2, 200))]
            args[which][1, 1, min(place, args[which].shape[2] - 1), 3] = value
            check(dtype, *args, None, None, 0.2, False, 0, 0.0)
