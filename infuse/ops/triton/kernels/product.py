"""Multiply a few rows of x by tiles of a plain or quantized weight, fused with the neighbours of the product.

Also the sum of split products, and the dequantization of whole weights.
"""

import triton
import triton.language as tl

from infuse.ops.triton.kernels.activation import activated
from infuse.ops.triton.kernels.norm import moments, scaled
from infuse.ops.triton.kernels.words import addend_of, codes_in_word, decoded, dot, load_words, shift_of, step_of


@triton.jit
def product_tiles(
    x, data, scale, zero, bias, norm_weight, norm_bias, residual, out,
    rows, inputs, outputs, x_stride, row_words, groups, of_group, eps, norm_offset,
    FORMAT: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr, NAME: tl.constexpr,
    SEGMENT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SEGMENTS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """residual + act(norm(x [rows, inputs]) @ weight [outputs, inputs].T + bias), or act(gate) * up of [gate | up].

    With SPLITS > 1, out receives float32 parts [SPLITS, rows, outputs] of the product alone. A tile has SEGMENTS
    segments along the inputs; in a plain weight a segment is SEGMENT consecutive inputs. `of_group` segments share a
    scale. The sum is [OUTPUTS, ROWS], so that the weight, the larger operand of a tile, can be dequantized in
    registers. With a norm, the rows are read once more beforehand, BLOCK columns at once.
    """
    wanted = outputs // 2 if GATED else outputs
    # Rows vary fastest, so that concurrent programs share a tile of the weight in L2.
    place = tl.program_id(0)
    row_tiles = tl.cdiv(rows, ROWS)
    row = (place % row_tiles) * ROWS + tl.arange(0, ROWS)
    output = (place // row_tiles) * OUTPUTS + tl.arange(0, OUTPUTS)
    split = tl.program_id(1)
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    upper = tl.zeros((OUTPUTS, ROWS), tl.float32)
    x_row = x + row.to(tl.int64) * x_stride
    mean, inverse = moments(x_row, row < rows, inputs, eps, NORM, ROWS, BLOCK)
    for tile in range(split, tl.cdiv(tl.cdiv(inputs, SEGMENT), SEGMENTS), SPLITS):
        total = add_tile(
            total, tile, x_row, row < rows, data, scale, zero, norm_weight, norm_bias, output, wanted, inputs,
            row_words, groups, of_group, mean, inverse, norm_offset, FORMAT, NORM, SEGMENT, SEGMENTS,
            x.dtype.element_ty,
        )  # fmt: skip
        if GATED:
            upper = add_tile(
                upper, tile, x_row, row < rows, data, scale, zero, norm_weight, norm_bias, wanted + output, outputs,
                inputs, row_words, groups, of_group, mean, inverse, norm_offset, FORMAT, NORM, SEGMENT, SEGMENTS,
                x.dtype.element_ty,
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
        at = row[None, :].to(tl.int64) * wanted + output[:, None]
        if residual is not None:
            total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_tile(
    total, tile, x_row, real, data, scale, zero, norm_weight, norm_bias, output, end, inputs,
    row_words, groups, of_group, mean, inverse, norm_offset,
    FORMAT: tl.constexpr, NORM: tl.constexpr, SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Add the product over one tile of the inputs: of the `real` rows of x and the rows before `end` of the weight."""
    CODES: tl.constexpr = codes_in_word(FORMAT)
    WORDS: tl.constexpr = SEGMENT // CODES
    DEPTH: tl.constexpr = SEGMENTS * WORDS  # of one product
    at = tl.arange(0, DEPTH)
    segment, word = tile * SEGMENTS + at // WORDS, at % WORDS
    if FORMAT == "plain":
        k = segment * SEGMENT + word
        x_tile = rows_of_tile(
            x_row, real, norm_weight, norm_bias, k, k < inputs, mean, inverse, norm_offset, NORM, DTYPE
        )
        start = data + output[:, None].to(tl.int64) * row_words
        tile_of_weight = tl.load(start + k[None, :], mask=(output[:, None] < end) & (k[None, :] < inputs), other=0.0)
        total = dot(tile_of_weight, x_tile, total)
    else:
        known = segment < inputs // SEGMENT
        # [outputs, segments, words]: scales are loaded once for a segment, not for each word.
        place = tile * SEGMENTS + tl.arange(0, SEGMENTS)[None, :, None]
        in_place = tl.arange(0, WORDS)[None, None, :]
        row = output[:, None, None].to(tl.int64)
        inside = (output[:, None, None] < end) & (place < inputs // SEGMENT)
        words, high = load_words(data + row * row_words, place, in_place, inputs, inside, FORMAT, SEGMENT)
        step = step_of(scale, zero, row, place // of_group, groups, inside, 0.0, FORMAT)
        shift = shift_of(zero, row, place // of_group, groups, inside, FORMAT)
        added = addend_of(scale, zero, row, place // of_group, groups, inside, FORMAT)
        for j in tl.static_range(CODES):
            k = segment * SEGMENT + j * WORDS + word
            x_tile = rows_of_tile(
                x_row, real, norm_weight, norm_bias, k, known, mean, inverse, norm_offset, NORM, DTYPE
            )
            tile_of_weight = decoded(words, high, step, shift, added, j, FORMAT).to(DTYPE)
            total = dot(tile_of_weight.reshape(output.shape[0], DEPTH), x_tile, total)
    return total


@triton.jit
def rows_of_tile(
    x_row, real, norm_weight, norm_bias, k, known, mean, inverse, norm_offset, NORM: tl.constexpr, DTYPE: tl.constexpr
):
    """The inputs `k` of the rows of x, [inputs, rows], normalised if there is a norm and rounded to DTYPE."""
    x_tile = tl.load(x_row[None, :] + k[:, None], mask=real[None, :] & known[:, None], other=0.0)
    if NORM is not None:
        y = (x_tile.to(tl.float32) - mean[None, :]) * inverse[None, :]
        x_tile = scaled(y, norm_weight, norm_bias, k[:, None], known[:, None], norm_offset).to(DTYPE)
    return x_tile


@triton.jit
def combine(
    parts, bias, residual, out, rows, outputs,
    GATED: tl.constexpr, NAME: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """residual + act(sum over the first axis of parts [SPLITS, rows, outputs] + bias), summed in order."""
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
    if residual is not None:
        y += tl.load(residual + row * wanted + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * wanted + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def dequantize_rows(
    index, data, scale, zero, out, inputs, outputs, row_words, groups, of_group,
    FORMAT: tl.constexpr, SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Dequantize all rows of the weight, or the rows `index`, to out [rows, inputs]; NaN for an index out of range."""
    CODES: tl.constexpr = codes_in_word(FORMAT)
    WORDS: tl.constexpr = SEGMENT // CODES
    place = tl.program_id(0).to(tl.int64)
    source = place
    if index is not None:
        source = tl.load(index + place).to(tl.int64)
    at = tl.arange(0, SEGMENTS * WORDS)
    segment, word = tl.program_id(1) * SEGMENTS + at // WORDS, at % WORDS
    known = segment < inputs // SEGMENT
    asked = source + 0 * segment
    there = known & (asked >= 0) & (asked < outputs)
    words, high = load_words(data + source * row_words, segment, word, inputs, there, FORMAT, SEGMENT)
    step = step_of(scale, zero, source, segment // of_group, groups, there, float("nan"), FORMAT)
    shift = shift_of(zero, source, segment // of_group, groups, there, FORMAT)
    added = addend_of(scale, zero, source, segment // of_group, groups, there, FORMAT)
    for j in tl.static_range(CODES):
        y = decoded(words, high, step, shift, added, j, FORMAT).to(out.dtype.element_ty)
        tl.store(out + place * inputs + segment * SEGMENT + j * WORDS + word, y, mask=known)
