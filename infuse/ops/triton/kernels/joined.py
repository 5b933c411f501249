"""The joined heads of ops/joined.py: a program normalises and rotates some heads of one token."""

import triton
import triton.language as tl


@triton.jit
def normed(here, weight, at, inside, width, eps):
    """The rows of `here` [HEADS, WIDTH] over their root mean square, as float32, and the factor of each row."""
    rate = tl.rsqrt(tl.sum(here * here, 1) / width + eps)[:, None]
    return here * rate * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)[None, :], rate


@triton.jit
def join_heads(
    x, q_weight, k_weight, cos, sin, out, tokens, first, all_tokens, heads, width, eps, HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the tokens of x [B, tokens, 3 heads, width] to out [B, all_tokens, ...] from token `first` on."""
    row = tl.program_id(0).to(tl.int64)
    to = row // tokens * all_tokens + first + row % tokens
    token = first + row % tokens
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, WIDTH)
    real = column < width
    inside = (head < 3 * heads) & real[None, :]
    other = column ^ 1  # the second of the pair that rotates
    y = tl.load(x + (row * 3 * heads + head) * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    pair = y
    cos_sin = (cos is not None) & (head < 2 * heads)
    if cos is not None:
        pair = tl.load(x + (row * 3 * heads + head) * width + other[None, :], mask=inside, other=0.0).to(tl.float32)
    if q_weight is not None:
        y_q, rate = normed(y, q_weight, column, real, width, eps)
        pair_q = pair * rate * tl.load(q_weight + other, mask=real, other=0.0).to(tl.float32)[None, :]
    if k_weight is not None:
        y_k, rate_k = normed(y, k_weight, column, real, width, eps)
        pair_k = pair * rate_k * tl.load(k_weight + other, mask=real, other=0.0).to(tl.float32)[None, :]
        of_key = (head >= heads) & (head < 2 * heads)
        y = tl.where(of_key, y_k, y)
        pair = tl.where(of_key, pair_k, pair)
    if q_weight is not None:
        y = tl.where(head < heads, y_q, y)
        pair = tl.where(head < heads, pair_q, pair)
    if cos is not None:
        sign = tl.where(column % 2 == 0, -1.0, 1.0)[None, :]
        c = tl.load(cos + token * width + column, mask=real, other=0.0)[None, :]
        s = tl.load(sin + token * width + column, mask=real, other=0.0)[None, :]
        y = tl.where(cos_sin, y * c + sign * pair * s, y)
    tl.store(out + (to * 3 * heads + head) * width + column[None, :], y.to(out.dtype.element_ty), mask=inside)
