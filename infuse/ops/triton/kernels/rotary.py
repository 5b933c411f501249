"""The rotary embedding of ops/rotary.py, alone or with the append to a cache.

A program rotates some heads of one token: it loads a tile [HEADS, WIDTH] and a second one with each value's partner.
"""

import triton
import triton.language as tl


@triton.jit
def turned(x, head, heads, column, width, cos, sin, turned_width, head_stride, INTERLEAVED: tl.constexpr):
    """Rotate heads [HEADS, 1] of the token at x by its cos and sin, in float32.

    Columns from turned_width on are unchanged.
    """
    inside = (head < heads) & (column < width)
    values = tl.load(x + head * head_stride + column, mask=inside, other=0.0).to(tl.float32)
    if INTERLEAVED:
        partner = column ^ 1
        sign = tl.where(column % 2 == 0, -1.0, 1.0)
    else:
        half = turned_width // 2
        partner = tl.where(column < half, column + half, column - half)
        sign = tl.where(column < half, -1.0, 1.0)
    cos_sin = inside & (column < turned_width)
    partners = tl.load(x + head * head_stride + partner, mask=cos_sin, other=0.0).to(tl.float32)
    c = tl.load(cos + column, mask=column < turned_width, other=1.0).to(tl.float32)
    s = tl.load(sin + column, mask=column < turned_width, other=0.0).to(tl.float32)
    return tl.where(column < turned_width, values * c + partners * (sign * s), values)


@triton.jit
def rotate(
    x, cos, sin, out, tokens, heads, width, turned_width,
    batch_stride, token_stride, head_stride, cos_batch_stride, cos_token_stride,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Rotate x [B, T, N, D] by cos and sin [B or 1, T, E] into out, which is contiguous."""
    place = tl.program_id(0).to(tl.int64)
    batch, token = place // tokens, place % tokens
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    turn = batch * cos_batch_stride + token * cos_token_stride
    y = turned(
        x + batch * batch_stride + token * token_stride, head, heads, column, width,
        cos + turn, sin + turn, turned_width, head_stride, INTERLEAVED,
    )  # fmt: skip
    tl.store(
        out + (place * heads + head) * width + column,
        y.to(out.dtype.element_ty),
        mask=(head < heads) & (column < width),
    )


@triton.jit
def rotate_append(
    qkv, cos, sin, keys, values, out, start, tokens, heads, kv_heads, width, turned_width, capacity,
    batch_stride, token_stride, head_stride, cos_batch_stride, cos_token_stride,
    key_batch_stride, key_head_stride, key_token_stride, value_batch_stride, value_head_stride, value_token_stride,
    INTERLEAVED: tl.constexpr, START_IS_THERE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Rotate qkv [B, T, H + 2K, D]; write queries to out [B, H, T, D], keys and values to the caches at `start`.

    The caches are [B, K, S, D]; nothing is written beyond their capacity. Without cos nothing is rotated.
    START_IS_THERE: `start` points to the number.
    """
    place = tl.program_id(0).to(tl.int64)
    batch, token = place // tokens, place % tokens
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    first = tl.load(start) if START_IS_THERE else start
    at = first + token + tl.zeros_like(head)
    here = qkv + batch * batch_stride + token * token_stride
    inside = (head < heads + 2 * kv_heads) & (column < width)
    y = tl.load(here + head * head_stride + column, mask=inside, other=0.0).to(tl.float32)
    if cos is not None:
        turn = batch * cos_batch_stride + token * cos_token_stride
        rotated = turned(
            here, head, heads + kv_heads, column, width, cos + turn, sin + turn, turned_width, head_stride, INTERLEAVED
        )
        y = tl.where(head < heads + kv_heads, rotated, y)
    is_query, is_value = head < heads, head >= heads + kv_heads
    tl.store(
        out + ((batch * heads + head) * tokens + token) * width + column,
        y.to(out.dtype.element_ty),
        mask=inside & is_query,
    )
    room = inside & (at >= 0) & (at < capacity)
    key = keys + batch * key_batch_stride + (head - heads) * key_head_stride + at * key_token_stride + column
    tl.store(key, y.to(keys.dtype.element_ty), mask=room & (head >= heads) & (head < heads + kv_heads))
    value = (
        values
        + batch * value_batch_stride
        + (head - heads - kv_heads) * value_head_stride
        + at * value_token_stride
        + column
    )
    tl.store(value, y.to(values.dtype.element_ty), mask=room & is_value)
