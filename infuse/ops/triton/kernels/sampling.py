"""The largest score, and a draw, of ops/sampling.py. Thresholds are found by digits of the scores' bits: nothing is
sorted.
"""

import triton
import triton.language as tl


@triton.jit
def ordered(x):
    """Float32 as uint32 in the same order; NaN is the largest."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)  # -0 is 0
    flipped = tl.where(bits >= 2147483648, 4294967295 - bits, bits + 2147483648).to(tl.uint32)
    return tl.where(x != x, tl.full(bits.shape, 4294967295, tl.uint32), flipped)


@triton.jit
def largest_of_part(logits, found, row_stride, vocabulary, share, BLOCK: tl.constexpr):
    """Of each row and part of the vocabulary: where its largest score is, and the score in order; found [parts, rows,
    2], int64.
    """
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    best = tl.full((BLOCK,), 0, tl.int64)
    first = part * share
    for start in range(first, tl.minimum(first + share, vocabulary), BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = (place < vocabulary) & (place < first + share)
        score = ordered(tl.load(logits + row * row_stride + place, mask=inside, other=float("-inf")).to(tl.float32)).to(
            tl.int64
        )
        # Order and place in one number: of equal scores the first place is the largest.
        best = tl.maximum(best, tl.where(inside, score * 2147483648 + (2147483647 - place), 0))
    tl.store(found + row * tl.num_programs(0) + part, tl.max(best, 0))


@triton.jit
def largest(found, out, parts, PARTS: tl.constexpr):
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    best = tl.max(tl.load(found + row.to(tl.int64) * parts + part, mask=part < parts, other=0), 0)
    tl.store(out + row, 2147483647 - best % 2147483648)


@triton.jit
def weights_at(logits, start, vocabulary, temperature, most, BLOCK: tl.constexpr):
    """The places from `start` on, their scores in order (0 beyond the vocabulary), and exp(score - most)."""
    place = start + tl.arange(0, BLOCK)
    inside = place < vocabulary
    score = tl.load(logits + place, mask=inside, other=float("-inf")).to(tl.float32) / temperature
    order = tl.where(inside, ordered(score), tl.full((BLOCK,), 0, tl.uint32))
    return place, order, tl.where(inside, tl.exp(score - most), 0.0)


@triton.jit
def threshold(logits, vocabulary, temperature, most, least, target, COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    """The largest order such that what is not below it, of what is not below `least`, comes to `target`: in number,
    where COUNTED, else in weight. Two bits in each of 16 passes.
    """
    found = tl.zeros((1,), tl.uint32)
    step = tl.full((1,), 1 << 30, tl.uint32)
    for digit in range(16):  # noqa: B007  (every name of a kernel has one type: no `_`)
        sums_1 = tl.zeros((BLOCK,), tl.float32)
        sums_2 = tl.zeros((BLOCK,), tl.float32)
        sums_3 = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocabulary, BLOCK):
            place, order, weight = weights_at(logits, start, vocabulary, temperature, most, BLOCK)
            if COUNTED:
                weight = tl.where(order > 0, 1.0, 0.0)
            weight = tl.where(order >= least, weight, 0.0)
            sums_1 += tl.where(order >= found + step, weight, 0.0)
            sums_2 += tl.where(order >= found + 2 * step, weight, 0.0)
            sums_3 += tl.where(order >= found + 3 * step, weight, 0.0)
        reached = (tl.sum(sums_1, 0) >= target).to(tl.uint32) + (tl.sum(sums_2, 0) >= target).to(tl.uint32)
        found += step * (reached + (tl.sum(sums_3, 0) >= target).to(tl.uint32))
        step = step >> 2
    return found


@triton.jit
def sample_row(
    logits, uniform, out, row_stride, vocabulary, temperature, top_k, top_p, TOP_K: tl.constexpr, TOP_P: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One row by one program."""
    row = tl.program_id(0)
    here = logits + row.to(tl.int64) * row_stride
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        place = start + tl.arange(0, BLOCK)
        highest = tl.maximum(
            highest, tl.load(here + place, mask=place < vocabulary, other=float("-inf")).to(tl.float32) / temperature
        )
    most = tl.max(highest, 0)
    least = tl.zeros((1,), tl.uint32)
    if TOP_K:
        least = threshold(here, vocabulary, temperature, most, least, top_k * 1.0, True, BLOCK)
    if TOP_P:
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocabulary, BLOCK):
            place, order, weight = weights_at(here, start, vocabulary, temperature, most, BLOCK)
            total += tl.where(order >= least, weight, 0.0)
        target = tl.maximum(tl.sum(total, 0) * top_p, 1e-30)  # the largest is kept in any case
        least = threshold(here, vocabulary, temperature, most, least, target, False, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        place, order, weight = weights_at(here, start, vocabulary, temperature, most, BLOCK)
        total += tl.where(order >= least, weight, 0.0)
    target = tl.sum(total, 0) * tl.load(uniform + row)
    before = 0.0
    first = tl.full((BLOCK,), 2147483647, tl.int32)
    last = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocabulary, BLOCK):
        place, order, weight = weights_at(here, start, vocabulary, temperature, most, BLOCK)
        weight = tl.where(order >= least, weight, 0.0)
        sums = before + tl.cumsum(weight, 0)
        first = tl.minimum(first, tl.where((sums > target) & (weight > 0), place, 2147483647))
        last = tl.maximum(last, tl.where(weight > 0, place, 0))
        before += tl.sum(weight, 0)
    tl.store(out + row, tl.minimum(tl.min(first, 0), tl.max(last, 0)).to(tl.int64))
