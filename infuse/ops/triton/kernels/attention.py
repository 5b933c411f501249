"""Attention of ops/attention.py with a running maximum and sum; for few queries, several programs split the keys.

The rows of a tile are all (query, head) pairs of one key head, so that keys and values are read once for all of them:
row r is query r // GROUP and head r % GROUP of the key head.
"""

import triton
import triton.language as tl

from infuse.ops.triton.kernels.activation import tanh
from infuse.ops.triton.kernels.words import dot


@triton.jit
def key_range(
    keys, tokens, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The first key (a multiple of KEYS) and the end of the keys that this program's rows attend to, or its share."""
    begin, end = keys * 0, keys
    if CAUSAL:
        end = tl.minimum(keys, keys - tokens + (tl.program_id(0) * ROWS + ROWS - 1) // GROUP + 1)
    if WINDOWED:
        begin = tl.maximum(keys - tokens + (tl.program_id(0) * ROWS) // GROUP - window + 1, 0) // KEYS * KEYS
    if SPLITS > 1:  # split the actual number of keys, not the capacity that the grid was sized for
        share = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), KEYS), SPLITS) * KEYS
        begin += tl.program_id(2) * share
        end = tl.minimum(end, begin + share)
    return begin, end


@triton.jit
def scores_of(q_tile, k, scales, at, there, d, width, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Products with the keys at `at`, which are codes of an int8 cache if there are scales."""
    k_tile = tl.load(k + at[None, :] + d[:, None], mask=there[None, :] & (d < width)[:, None], other=0.0)
    if scales is not None:
        k_tile = k_tile.to(tl.float32).to(q_tile.dtype)  # exact; the interpreter casts no integers to bfloat16
    scores = dot(q_tile, k_tile, tl.zeros((ROWS, KEYS), tl.float32))
    if scales is not None:
        scores *= tl.load(scales + at // 4, mask=there, other=0.0)[None, :]
    return scores


@triton.jit
def values_of(v, scales, at, there, of_value, width, dtype: tl.constexpr):
    """The values at `at`, likewise."""
    inside = there[:, None] & (of_value < width)[None, :]
    v_tile = tl.load(v + at[:, None] + of_value[None, :], mask=inside, other=0.0)
    if scales is not None:
        of_key = tl.load(scales + at // 4, mask=there, other=0.0)
        v_tile = (v_tile.to(tl.float32) * of_key[:, None]).to(dtype)
    return v_tile


@triton.jit
def biased(scores, allowed, bias, at):
    """The scores plus the bias, if any."""
    if bias is not None:
        scores += tl.load(bias + at, mask=allowed, other=0.0).to(tl.float32)
    return scores


@triton.jit
def masked(scores, allowed, mask, at, MASK_IS_BOOL: tl.constexpr):
    """The scores, set to -inf where masked, and the updated `allowed`."""
    if mask is not None:
        entries = tl.load(mask + at, mask=allowed, other=0)
        if MASK_IS_BOOL:
            allowed &= entries != 0
        else:
            scores += entries.to(tl.float32)
            allowed &= entries != float("-inf")
    return tl.where(allowed, scores, float("-inf")), allowed


@triton.jit
def added(scores, v_tile, highest, total, part):
    """Update the running maximum, sum and weighted values with one more tile of keys."""
    higher = tl.maximum(highest, tl.max(scores, 1))
    known = tl.where(higher == float("-inf"), 0.0, higher)  # all keys masked so far: exp gives 0, not NaN
    weights = tl.exp(scores - known[:, None])
    shrink = tl.exp(highest - known)
    return higher, total * shrink + tl.sum(weights, 1), dot(weights.to(v_tile.dtype), v_tile, part * shrink[:, None])


@triton.jit
def with_sink(total, highest, sinks, head):
    """The sum plus the weight of the head's sink, if any; infinite if the sink is far above all scores."""
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32)
        base = tl.maximum(sink, highest)
        keep = tl.exp(highest - base)
        sum_of_scores = tl.where(highest == float("-inf"), 0.0, total * keep)
        unchanged = (sink == float("-inf")) | ((highest == float("-inf")) & (total == 0.0))  # or fully masked
        total = tl.where(unchanged, total, (sum_of_scores + tl.exp(sink - base)) / keep)
    return total


@triton.jit
def write_rows(highest, total, part, at, real, of_value, value_width, sinks, head, out, sums, SPLITS: tl.constexpr):
    """Write rows `at` of the result, or of a partial result with its maximum and sum."""
    inside = real[:, None] & (of_value < value_width)[None, :]
    if SPLITS > 1:
        tl.store(sums + at * 2, highest, mask=real)
        tl.store(sums + at * 2 + 1, total, mask=real)
    else:
        total = with_sink(total, highest, sinks, head)
        part = part / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + at[:, None] * value_width + of_value[None, :], part.to(out.dtype.element_ty), mask=inside)


@triton.jit
def attend(
    q, k, v, k_scales, v_scales, mask, bias, sinks, out, sums, length, tokens, kv_heads, width, value_width, scale,
    window, softcap, q_batch_stride, q_head_stride, q_token_stride, k_batch_stride, k_head_stride, k_token_stride,
    v_batch_stride, v_head_stride, v_token_stride, mask_batch_stride, mask_head_stride, mask_token_stride,
    mask_key_stride, bias_batch_stride, bias_head_stride, bias_token_stride, bias_key_stride,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, MASK_IS_BOOL: tl.constexpr,
    LENGTH_IS_THERE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Attention of q [B, H, T, D] over k, v [B, K, L, D], written to out [B, T, H, D].

    With k_scales and v_scales, k and v are codes of an int8 cache (ops/cache_rows.py); strides are theirs, in bytes.

    With SPLITS > 1, out receives undivided float32 parts [SPLITS, B * T * H, D], and sums [SPLITS, B * T * H, 2] the
    maximum and the sum of each. LENGTH_IS_THERE: `length` points to the number of keys.
    """
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.program_id(1).to(tl.int64)
    batch, kv_head = place // kv_heads, place % kv_heads
    token, head = r // GROUP, kv_head * GROUP + r % GROUP
    d, of_value = tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
    real = token < tokens
    q_at = q + batch * q_batch_stride + head * q_head_stride + token * q_token_stride
    q_tile = tl.load(q_at[:, None] + d[None, :], mask=real[:, None] & (d < width)[None, :], other=0.0)
    keys = tl.load(length).to(tl.int32) if LENGTH_IS_THERE else length
    query = keys - tokens + token  # the query's position among the keys
    begin, end = key_range(keys, tokens, window, CAUSAL, WINDOWED, GROUP, ROWS, KEYS, SPLITS)
    highest, part = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS, VALUE_WIDTH), tl.float32)
    total, seen = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.int32)
    k_first = batch * k_batch_stride + kv_head * k_head_stride
    v_first = batch * v_batch_stride + kv_head * v_head_stride
    for first in range(begin, end, KEYS):
        key = first + tl.arange(0, KEYS)
        there = key < keys
        at = k_first + key.to(tl.int64) * k_token_stride
        scores = scores_of(q_tile, k, k_scales, at, there, d, width, ROWS, KEYS) * scale
        if CAPPED:
            scores = tanh(scores / softcap) * softcap
        allowed = real[:, None] & there[None, :]
        if CAUSAL:
            allowed &= key[None, :] <= query[:, None]
        if WINDOWED:
            allowed &= key[None, :] > (query - window)[:, None]
        at = batch * bias_batch_stride + head * bias_head_stride + token * bias_token_stride
        scores = biased(scores, allowed, bias, at[:, None] + key[None, :] * bias_key_stride)
        at = batch * mask_batch_stride + head * mask_head_stride + token * mask_token_stride
        scores, allowed = masked(scores, allowed, mask, at[:, None] + key[None, :] * mask_key_stride, MASK_IS_BOOL)
        at = v_first + key.to(tl.int64) * v_token_stride
        v_tile = values_of(v, v_scales, at, there, of_value, value_width, q_tile.dtype)
        seen = tl.maximum(seen, tl.max(allowed.to(tl.int32), 1))
        highest, total, part = added(scores, v_tile, highest, total, part)
    # If all allowed scores are -inf, the result is NaN, as in softmax; a fully masked row is zeros.
    total = tl.where((highest == float("-inf")) & (seen == 1), float("nan"), total)
    at = (batch * tokens + token) * kv_heads * GROUP + head
    if SPLITS > 1:
        at += tl.program_id(2).to(tl.int64) * (tl.num_programs(1) // kv_heads) * tokens * kv_heads * GROUP
    write_rows(highest, total, part, at, real, of_value, value_width, sinks, head, out, sums, SPLITS)


@triton.jit
def combine_splits(parts, sums, sinks, out, rows, heads, value_width, VALUE_WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    """Combine the parts of one row of the result, always in the same order; its head is row % heads."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS).to(tl.int64) * rows + row
    d = tl.arange(0, VALUE_WIDTH)
    highest = tl.load(sums + split * 2)
    most = tl.max(highest, 0)
    share = tl.exp(highest - tl.where(most == float("-inf"), 0.0, most))
    sum_of_part = tl.load(sums + split * 2 + 1)
    # A part whose scores are all -inf has the sum NaN. It counts only if all parts are like it.
    weighed = share * sum_of_part
    total = tl.sum(tl.where(highest == float("-inf"), tl.where(most == float("-inf"), weighed, 0.0), weighed), 0)
    total = with_sink(total, most, sinks, row % heads)
    part = tl.load(parts + split[:, None] * value_width + d[None, :], mask=(d < value_width)[None, :], other=0.0)
    y = tl.sum(share[:, None] * part, 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * value_width + d, y.to(out.dtype.element_ty), mask=d < value_width)
