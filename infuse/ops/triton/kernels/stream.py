"""One row of x times a weight, which is streamed once: each program walks some rows of the weight, all of its threads along a row.

Products and sums are float32; a sum over a thread's own values comes first, the sum over threads once at the end.
"""

import triton
import triton.language as tl

from infuse.ops.triton.kernels.activation import activated
from infuse.ops.triton.kernels.words import codes_in_word, offset, tiny_scale, tiny_value, unit, value, zero_unit


@triton.jit
def plain_row(
    x, weight, bias, out, inputs, outputs, weight_stride,
    GATED: tl.constexpr, NAME: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """act(x [inputs] @ weight [outputs, inputs].T + bias), or act(gate) * up of [gate | up]; with SPLITS float32 parts [SPLITS, rows]."""
    split = tl.program_id(1)
    row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)[:, None]
    column = tl.arange(0, INPUTS)[None, :]
    wanted = outputs // 2 if GATED else outputs
    total = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    upper = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    start = weight + row.to(tl.int64) * weight_stride
    for tile in range(split, tl.cdiv(inputs, INPUTS), SPLITS):
        k = tile * INPUTS + column
        x_k = tl.load(x + k, mask=k < inputs, other=0.0).to(tl.float32)
        inside = (row < wanted) & (k < inputs)
        total += tl.load(start + k, mask=inside, other=0.0).to(tl.float32) * x_k
        if GATED:
            upper += tl.load(start + k + wanted.to(tl.int64) * weight_stride, mask=inside, other=0.0).to(tl.float32) * x_k
    y, up = tl.sum(total, 1), tl.sum(upper, 1)
    finish(y, up, bias, out, tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), outputs, split, GATED, NAME, SPLITS)


@triton.jit
def finish(y, up, bias, out, at, outputs, split, GATED: tl.constexpr, NAME: tl.constexpr, SPLITS: tl.constexpr):
    """Bias and activation of some outputs of one row, or, where others hold the rest of the sum, the part as it is."""
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
        tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def quantized_row(
    x, data, scale, zero, bias, out, inputs, outputs, row_words, groups, of_group,
    FORMAT: tl.constexpr, TINY: tl.constexpr, SEGMENT: tl.constexpr,
    OUTPUTS: tl.constexpr, SEGMENTS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """x [inputs] @ dequantized weight [outputs, inputs].T + bias. A tile is [OUTPUTS, SEGMENTS, words].

    `of_group` segments share a scale. TINY is faster, for x of 16 bits: values of x beyond 2**48 make infinity or NaN.
    """
    CODES: tl.constexpr = codes_in_word(FORMAT)
    WORDS: tl.constexpr = SEGMENT // CODES
    STRIDE: tl.constexpr = WORDS + WORDS // 2 if FORMAT == "fp6" else WORDS
    split = tl.program_id(1)
    row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)[:, None, None]
    word = tl.arange(0, WORDS)[None, None, :]
    segments = inputs // SEGMENT
    start = data + row.to(tl.int64) * row_words
    total = tl.zeros((OUTPUTS, SEGMENTS, WORDS), tl.float32)
    for tile in range(split, tl.cdiv(segments, SEGMENTS), SPLITS):
        segment = tile * SEGMENTS + tl.arange(0, SEGMENTS)[None, :, None]
        inside = (row < outputs) & (segment < segments)
        words = tl.load(start + segment * STRIDE + word, mask=inside, other=0)
        high = words
        if FORMAT == "fp6":
            high = tl.load(start + segment * STRIDE + WORDS + word % (WORDS // 2), mask=inside, other=0)
            high = high >> (8 * (word // (WORDS // 2)))
        group = row.to(tl.int64) * groups + segment // of_group
        step = tl.load(scale + group, mask=inside, other=0.0).to(tl.float32)
        part = tl.zeros((OUTPUTS, SEGMENTS, WORDS), tl.float32)
        x_sum = tl.zeros((1, SEGMENTS, WORDS), tl.float32)
        shift = offset(FORMAT) if TINY else 0.0
        if zero is not None:
            shift += tl.load(zero + group, mask=inside, other=0).to(tl.float32) * zero_unit(FORMAT)
        for j in tl.static_range(CODES):
            x_j = tl.load(x + segment * SEGMENT + j * WORDS + word, mask=segment < segments, other=0.0).to(tl.float32)
            if TINY:
                part += tiny_value(words, high, j, FORMAT) * (x_j * tiny_scale(j, FORMAT))
                x_sum += x_j
            elif zero is None:
                part += value(words, high, j, FORMAT) * x_j
            else:
                part += (value(words, high, j, FORMAT) - shift) * x_j
        part *= unit(FORMAT, TINY)
        if TINY and (zero is not None or offset(FORMAT) > 0):
            part -= shift * x_sum
        total += part * step
    y = tl.sum(tl.sum(total, 2), 1)
    finish(y, y, bias, out, tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), outputs, split, False, None, SPLITS)
