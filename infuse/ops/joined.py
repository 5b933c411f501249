"""Queries, keys and values of one or two sequences, ready for attention over both.

Suffixes: B batch, T tokens, N heads of queries, keys and values together (3 H), D head width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from infuse.ops.norm import rms_norm
from infuse.ops.op import Case, op
from infuse.ops.rotary import rotary


@op(
    "joined_heads(Tensor first, Tensor? second, Tensor? first_q, Tensor? first_k, Tensor? second_q, Tensor? second_k,"
    " Tensor? cos, Tensor? sin, float eps) -> Tensor"
)
def joined_heads(
    first_BTND: Tensor, second_BTND: Tensor | None, first_q: Tensor | None, first_k: Tensor | None,
    second_q: Tensor | None, second_k: Tensor | None, cos_TD: Tensor | None, sin_TD: Tensor | None, eps: float,
) -> Tensor:  # fmt: skip
    """[B, T1 + T2, 3 H, D]: both sequences in order, the heads of each token as in its input, [q | k | v].

    Queries and keys are normalised in each head with the weights [D] of their sequence (RMS; None: not at all), and
    then rotated in neighbouring pairs by cos and sin [T1 + T2, D]. Computed in float32; a body may round in between.
    """
    parts = [_normed(first_BTND, first_q, first_k, eps)]
    if second_BTND is not None:
        parts.append(_normed(second_BTND, second_q, second_k, eps))
    joined, dtype = torch.cat(parts, dim=1), first_BTND.dtype
    if cos_TD is None or sin_TD is None:
        return joined.to(dtype)
    heads = joined.shape[2] // 3
    turned = rotary.reference(joined[:, :, : 2 * heads], cos_TD[None], sin_TD[None], True)
    return torch.cat((turned.to(dtype), joined[:, :, 2 * heads :].to(dtype)), dim=2)


def _normed(x_BTND: Tensor, q: Tensor | None, k: Tensor | None, eps: float) -> Tensor:
    """x in float32 with its queries and keys normalised."""
    three = zip(x_BTND.float().chunk(3, dim=2), (q, k, None), strict=True)
    return torch.cat([heads if w is None else rms_norm.reference(heads, w, eps, 0.0) for heads, w in three], dim=2)


@joined_heads.fake
def _fake(first: Tensor, second: Tensor | None, *_: object) -> Tensor:
    batch, tokens, heads, width = first.shape
    return first.new_empty(batch, tokens + (0 if second is None else second.shape[1]), heads, width)


_SIZES = ((1, 5, 3, 2, 16), (2, 4, 7, 3, 24), (1, 9, 0, 1, 40), (2, 1, 6, 2, 8))  # B, T1, T2, H, D


@joined_heads.cases
def _cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for batch, first, second, heads, width in _SIZES:

        def made(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=dtype, device=device)

        angles = torch.rand(first + second, width // 2, device=device).repeat_interleave(2, dim=1) * 6.28
        cos_sin = angles.cos(), angles.sin()
        qkv, other_qkv = made(batch, first, 3 * heads, width), made(batch, second, 3 * heads, width)
        weights = [made(width) for _ in range(4)]
        label = f"{batch}x({first}+{second})x{heads}x{width}"
        yield Case(f"{label} normed turned", (qkv, other_qkv, *weights, *cos_sin, 1e-6))
        yield Case(f"{label} bare", (qkv, other_qkv, None, None, None, None, None, None, 1e-6))
        yield Case(f"{label} one key norm", (qkv, other_qkv, None, weights[1], None, None, *cos_sin, 1e-6))
        if not second:
            yield Case(f"{label} alone", (qkv, None, *weights[:2], None, None, *cos_sin, 1e-6))
