"""Some rows of x times a weight in tiles, plain or quantized; the sum of parts that programs have shared; whole weights dequantized."""

import triton
import triton.language as tl

from infuse.ops.triton.kernels.activation import activated
from infuse.ops.triton.kernels.words import codes_in_word, dot, unit, value, zero_unit


@triton.jit
def weights(words, high, step, shift, J: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Code J of each word, dequantized and rounded to DTYPE; words, step and shift of one shape or broadcast to it."""
    return ((value(words, high, J, FORMAT) * unit(FORMAT, False) - shift) * step).to(DTYPE)


@triton.jit
def product_tiles(
    x, data, scale, zero, bias, out, rows, inputs, outputs, x_stride, row_words, groups, of_group,
    FORMAT: tl.constexpr, GATED: tl.constexpr, NAME: tl.constexpr, SEGMENT: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SEGMENTS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """act(x [rows, inputs] @ weight [outputs, inputs].T + bias), or act(gate) * up of [gate | up].

    With SPLITS float32 parts [SPLITS, rows, outputs]. A tile is SEGMENTS segments along the inputs; of a plain weight a segment is SEGMENT
    neighbouring inputs. `of_group` segments share a scale. The sum is [OUTPUTS, ROWS]: the weight, which has the larger side of a tile,
    may then be dequantized in registers.
    """
    wanted = outputs // 2 if GATED else outputs
    # Programs that run together share a tile of the weight in L2: rows vary fastest.
    place = tl.program_id(0)
    row_tiles = tl.cdiv(rows, ROWS)
    row = (place % row_tiles) * ROWS + tl.arange(0, ROWS)
    output = (place // row_tiles) * OUTPUTS + tl.arange(0, OUTPUTS)
    split = tl.program_id(1)
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    upper = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for tile in range(split, tl.cdiv(tl.cdiv(inputs, SEGMENT), SEGMENTS), SPLITS):
        total = add_tile(
            total, tile, x, data, scale, zero, row, output, wanted, rows, inputs, x_stride, row_words, groups, of_group,
            FORMAT, SEGMENT, ROWS, OUTPUTS, SEGMENTS,
        )  # fmt: skip
        if GATED:  # plain weights alone
            upper = add_tile(
                upper, tile, x, data + wanted.to(tl.int64) * row_words, scale, zero, row, output, wanted, rows, inputs, x_stride, row_words,
                groups, of_group, FORMAT, SEGMENT, ROWS, OUTPUTS, SEGMENTS,
            )  # fmt: skip
    inside = (row[None, :] < rows) & (output[:, None] < wanted)
    if SPLITS > 1:
        at = (split * rows + row[None, :]).to(tl.int64) * outputs + output[:, None]
        tl.store(out + at, total, mask=inside)
        if GATED:
            tl.store(out + at + wanted, upper, mask=inside)
    else:
        if bias is not None:
            total += tl.load(bias + output, mask=output < wanted, other=0.0).to(tl.float32)[:, None]
        if GATED and bias is not None:
            upper += tl.load(bias + wanted + output, mask=output < wanted, other=0.0).to(tl.float32)[:, None]
        total = activated(total, NAME)
        if GATED:
            total = total * upper
        tl.store(out + row[None, :].to(tl.int64) * wanted + output[:, None], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_tile(
    total, tile, x, data, scale, zero, row, output, outputs, rows, inputs, x_stride, row_words, groups, of_group,
    FORMAT: tl.constexpr, SEGMENT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """total + the product over one tile of the inputs."""
    CODES: tl.constexpr = codes_in_word(FORMAT)
    WORDS: tl.constexpr = SEGMENT // CODES
    STRIDE: tl.constexpr = WORDS + WORDS // 2 if FORMAT == "fp6" else WORDS
    DEPTH: tl.constexpr = SEGMENTS * WORDS  # of one product
    at = tl.arange(0, DEPTH)
    segment, word = tile * SEGMENTS + at // WORDS, at % WORDS
    x_row = x + row[None, :].to(tl.int64) * x_stride
    start = data + output[:, None].to(tl.int64) * row_words
    if FORMAT == "plain":
        k = segment * SEGMENT + word
        x_tile = tl.load(x_row + k[:, None], mask=(row[None, :] < rows) & (k[:, None] < inputs), other=0.0)
        tile_of_weight = tl.load(start + k[None, :], mask=(output[:, None] < outputs) & (k[None, :] < inputs), other=0.0)
        total = dot(tile_of_weight, x_tile, total)
    else:
        known = segment < inputs // SEGMENT
        inside = (output[:, None] < outputs) & known[None, :]
        words = tl.load(start + (segment * STRIDE + word)[None, :], mask=inside, other=0)
        high = words
        if FORMAT == "fp6":
            high = tl.load(start + (segment * STRIDE + WORDS + word % (WORDS // 2))[None, :], mask=inside, other=0)
            high = high >> (8 * (word // (WORDS // 2)))[None, :]
        group = output[:, None].to(tl.int64) * groups + (segment // of_group)[None, :]
        step = tl.load(scale + group, mask=inside, other=0.0).to(tl.float32)
        shift = tl.zeros((1, 1), tl.float32)
        if zero is not None:
            shift = tl.load(zero + group, mask=inside, other=0).to(tl.float32) * zero_unit(FORMAT)
        for j in tl.static_range(CODES):
            k = segment * SEGMENT + j * WORDS + word
            x_tile = tl.load(x_row + k[:, None], mask=(row[None, :] < rows) & known[:, None], other=0.0)
            total = dot(weights(words, high, step, shift, j, FORMAT, x.dtype.element_ty), x_tile, total)
    return total


@triton.jit
def combine(
    parts, bias, out, rows, outputs, GATED: tl.constexpr, NAME: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """act(the sum over the first axis of parts [SPLITS, rows, outputs] + bias), in the order of the parts."""
    row = tl.program_id(1).to(tl.int64)
    wanted = outputs // 2 if GATED else outputs
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < wanted
    y = tl.zeros((BLOCK,), tl.float32)
    up = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        here = parts + (split * rows + row) * outputs + at
        y += tl.load(here, mask=inside, other=0.0)
        if GATED:
            up += tl.load(here + wanted, mask=inside, other=0.0)
    if bias is not None:
        y += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias + wanted + at, mask=inside, other=0.0).to(tl.float32)
    y = activated(y, NAME)
    if GATED:
        y = y * up
    tl.store(out + row * wanted + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def dequantize_rows(
    index, data, scale, zero, out, inputs, outputs, row_words, groups, of_group,
    FORMAT: tl.constexpr, SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Rows of the weight as numbers, out [rows, inputs]: all of them, or those of `index`; NaN where there is no such row."""
    CODES: tl.constexpr = codes_in_word(FORMAT)
    WORDS: tl.constexpr = SEGMENT // CODES
    STRIDE: tl.constexpr = WORDS + WORDS // 2 if FORMAT == "fp6" else WORDS
    place = tl.program_id(0).to(tl.int64)
    source = place
    if index is not None:
        source = tl.load(index + place).to(tl.int64)
    at = tl.arange(0, SEGMENTS * WORDS)
    segment, word = tl.program_id(1) * SEGMENTS + at // WORDS, at % WORDS
    known = segment < inputs // SEGMENT
    asked = source + 0 * segment
    there = known & (asked >= 0) & (asked < outputs)
    start = data + source * row_words + segment * STRIDE
    words = tl.load(start + word, mask=there, other=0)
    high = words
    if FORMAT == "fp6":
        high = tl.load(start + WORDS + word % (WORDS // 2), mask=there, other=0) >> (8 * (word // (WORDS // 2)))
    group = source * groups + segment // of_group
    step = tl.load(scale + group, mask=there, other=float("nan")).to(tl.float32)
    shift = 0.0
    if zero is not None:
        shift = tl.load(zero + group, mask=there, other=0).to(tl.float32) * zero_unit(FORMAT)
    for j in tl.static_range(CODES):
        y = weights(words, high, step, shift, j, FORMAT, out.dtype.element_ty)
        tl.store(out + place * inputs + segment * SEGMENT + j * WORDS + word, y, mask=known)
