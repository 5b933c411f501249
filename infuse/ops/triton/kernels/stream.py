"""Multiply one row of x by a weight that is streamed once.

Each program reads some rows of the weight, with all threads along a row. Products and sums are float32; each thread
sums its own values first, and the sum over threads comes once at the end. With a norm (NORM), each program first reads
x once more from the cache, a BLOCK at a time, and normalises the values that it multiplies.
"""

import triton
import triton.language as tl

from infuse.ops.triton.kernels.activation import activated
from infuse.ops.triton.kernels.norm import moments, scaled
from infuse.ops.triton.kernels.words import (
    addend_of,
    codes_in_word,
    decoded,
    load_words,
    offset,
    shift_of,
    step_of,
    tiny_scale,
    tiny_value,
    unit,
)


@triton.jit
def plain_row(
    x, weight, bias, norm_weight, norm_bias, residual, out, inputs, outputs, weight_stride, eps, norm_offset,
    NORM: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr, NAME: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """residual + act(norm(x [inputs]) @ weight [outputs, inputs].T + bias), or act(gate) * up of [gate | up].

    With SPLITS > 1, out receives float32 parts [SPLITS, outputs] of the product alone.
    """
    split = tl.program_id(1)
    row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)[:, None]
    column = tl.arange(0, INPUTS)[None, :]
    wanted = outputs // 2 if GATED else outputs
    total = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    upper = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    start = weight + row.to(tl.int64) * weight_stride
    mean, inverse = moments(x + tl.zeros((1,), tl.int32), tl.full((1,), 1, tl.int1), inputs, eps, NORM, 1, BLOCK)
    for tile in range(split, tl.cdiv(inputs, INPUTS), SPLITS):
        k = tile * INPUTS + column
        x_k = tl.load(x + k, mask=k < inputs, other=0.0).to(tl.float32)
        if NORM is not None:
            x_k = scaled((x_k - mean[:, None]) * inverse[:, None], norm_weight, norm_bias, k, k < inputs, norm_offset)
        inside = (row < wanted) & (k < inputs)
        total += tl.load(start + k, mask=inside, other=0.0).to(tl.float32) * x_k
        if GATED:
            upper += (
                tl.load(start + k + wanted.to(tl.int64) * weight_stride, mask=inside, other=0.0).to(tl.float32) * x_k
            )
    y, up = tl.sum(total, 1), tl.sum(upper, 1)
    finish(
        y,
        up,
        bias,
        residual,
        out,
        tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS),
        outputs,
        split,
        GATED,
        NAME,
        SPLITS,
    )


@triton.jit
def finish(
    y, up, bias, residual, out, at, outputs, split, GATED: tl.constexpr, NAME: tl.constexpr, SPLITS: tl.constexpr
):
    """Write some outputs of one row with bias, activation and residual; with SPLITS > 1, the bare partial sums."""
    wanted = outputs // 2 if GATED else outputs
    inside = at < wanted
    if SPLITS > 1:
        tl.store(out + split * outputs + at, y, mask=inside)
        if GATED:
            tl.store(out + split * outputs + wanted + at, up, mask=inside)
    else:
        if bias is not None:
            y += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
        if GATED and bias is not None:
            up += tl.load(bias + wanted + at, mask=inside, other=0.0).to(tl.float32)
        y = activated(y, NAME)
        if GATED:
            y = y * up
        if residual is not None:
            y += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def quantized_row(
    x, data, scale, zero, bias, norm_weight, norm_bias, residual, out,
    inputs, outputs, row_words, groups, of_group, eps, norm_offset,
    FORMAT: tl.constexpr, TINY: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr,
    NAME: tl.constexpr, SEGMENT: tl.constexpr, OUTPUTS: tl.constexpr, SEGMENTS: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """`plain_row` with a quantized weight. A tile is [OUTPUTS, SEGMENTS, words].

    `of_group` segments share a scale. TINY is faster and for 16-bit x: values beyond 2**48 give infinity or NaN.
    """
    WORDS: tl.constexpr = SEGMENT // codes_in_word(FORMAT)
    split = tl.program_id(1)
    at = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    wanted = outputs // 2 if GATED else outputs
    total = tl.zeros((OUTPUTS, SEGMENTS, WORDS), tl.float32)
    upper = tl.zeros((OUTPUTS, SEGMENTS, WORDS), tl.float32)
    mean, inverse = moments(x + tl.zeros((1,), tl.int32), tl.full((1,), 1, tl.int1), inputs, eps, NORM, 1, BLOCK)
    for tile in tl.range(split, tl.cdiv(inputs // SEGMENT, SEGMENTS), SPLITS, num_stages=STAGES):
        total += tile_of_row(
            tile, x, data, scale, zero, norm_weight, norm_bias, at, wanted, inputs, row_words, groups, of_group,
            mean, inverse, norm_offset, FORMAT, TINY, NORM, SEGMENT, OUTPUTS, SEGMENTS,
        )  # fmt: skip
        if GATED:
            upper += tile_of_row(
                tile, x, data, scale, zero, norm_weight, norm_bias, wanted + at, outputs, inputs, row_words, groups,
                of_group, mean, inverse, norm_offset, FORMAT, TINY, NORM, SEGMENT, OUTPUTS, SEGMENTS,
            )  # fmt: skip
    y, up = tl.sum(tl.sum(total, 2), 1), tl.sum(tl.sum(upper, 2), 1)
    finish(y, up, bias, residual, out, at, outputs, split, GATED, NAME, SPLITS)


@triton.jit
def tile_of_row(
    tile, x, data, scale, zero, norm_weight, norm_bias, at, end, inputs, row_words, groups, of_group,
    mean, inverse, norm_offset,
    FORMAT: tl.constexpr, TINY: tl.constexpr, NORM: tl.constexpr,
    SEGMENT: tl.constexpr, OUTPUTS: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """The unsummed products of one tile of the inputs with those rows `at` of the weight that are before `end`."""
    CODES: tl.constexpr = codes_in_word(FORMAT)
    WORDS: tl.constexpr = SEGMENT // CODES
    row = at[:, None, None]
    word = tl.arange(0, WORDS)[None, None, :]
    segments = inputs // SEGMENT
    segment = tile * SEGMENTS + tl.arange(0, SEGMENTS)[None, :, None]
    inside = (row < end) & (segment < segments)
    start = data + row.to(tl.int64) * row_words
    words, high = load_words(start, segment, word, inputs, inside, FORMAT, SEGMENT)
    step = step_of(scale, zero, row, segment // of_group, groups, inside, 0.0, FORMAT)
    shift = shift_of(zero, row, segment // of_group, groups, inside, FORMAT)
    added = addend_of(scale, zero, row, segment // of_group, groups, inside, FORMAT)
    part = tl.zeros((OUTPUTS, SEGMENTS, WORDS), tl.float32)
    x_sum = tl.zeros((1, SEGMENTS, WORDS), tl.float32)
    for j in tl.static_range(CODES):
        k = segment * SEGMENT + j * WORDS + word
        x_j = tl.load(x + k, mask=segment < segments, other=0.0).to(tl.float32)
        if NORM is not None:
            x_j = (x_j - mean[:, None, None]) * inverse[:, None, None]
            x_j = scaled(x_j, norm_weight, norm_bias, k, segment < segments, norm_offset)
        if TINY:
            part += tiny_value(words, high, j, FORMAT) * (x_j * tiny_scale(j, FORMAT))
            x_sum += x_j
        else:
            part += decoded(words, high, step, shift, added, j, FORMAT) * x_j
    if TINY:
        part *= unit(FORMAT, True)
        if added is None and shift is not None:
            part -= (shift + offset(FORMAT)) * x_sum
        elif added is None and offset(FORMAT) > 0:
            part -= offset(FORMAT) * x_sum
        part *= step
        if added is not None:  # its codes begin with 0
            part += added * x_sum
    return part
