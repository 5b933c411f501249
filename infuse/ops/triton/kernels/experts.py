"""Multiply tokens by the experts that a router chose, and sum the outputs of a token's experts.

A route is one pair (token, expert), counted as token * routes + route. The rows of an expert are `outputs` consecutive
rows of a tall matrix. Few routes: each streams the rows of its expert. Many: routes that are sorted by expert and cut
into tiles of one expert each (`sort_routes` in ops/triton/experts.py) multiply tiles of the weight.
"""

import triton
import triton.language as tl

from infuse.ops.triton.kernels.activation import activated
from infuse.ops.triton.kernels.product import add_tile
from infuse.ops.triton.kernels.stream import tile_of_row
from infuse.ops.triton.kernels.words import codes_in_word


@triton.jit
def through_gate(
    gate, up, GATED: tl.constexpr, NAME: tl.constexpr, LIMIT: tl.constexpr, AFTER: tl.constexpr, OFFSET: tl.constexpr
):
    """ExpertGate.inner of ops/experts.py on float32 values. NaN stays."""
    if GATED and LIMIT > 0:
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        if not AFTER:
            gate = tl.where(gate > LIMIT, LIMIT, gate)
    y = activated(gate, NAME)
    if GATED:
        if LIMIT > 0 and AFTER:
            y = tl.where(y > LIMIT, LIMIT, y)
        y = y * (up + OFFSET)
    return y


@triton.jit
def row_product(
    x, data, scale, zero, bias, at, end, inputs, row_words, groups, of_group,
    FORMAT: tl.constexpr, TINY: tl.constexpr, SEGMENT: tl.constexpr, OUTPUTS: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """x [inputs] times those rows `at` of the weight that are before `end`, plus bias: [OUTPUTS] in float32."""
    WORDS: tl.constexpr = SEGMENT // codes_in_word(FORMAT)
    total = tl.zeros((OUTPUTS, SEGMENTS, WORDS), tl.float32)
    for tile in range(0, tl.cdiv(tl.cdiv(inputs, SEGMENT), SEGMENTS)):
        if FORMAT == "plain":
            k = tile * SEGMENT + tl.arange(0, SEGMENT)[None, None, :]
            row = at[:, None, None]
            here = tl.load(data + row.to(tl.int64) * row_words + k, mask=(row < end) & (k < inputs), other=0.0)
            total += here.to(tl.float32) * tl.load(x + k, mask=k < inputs, other=0.0).to(tl.float32)
        else:
            total += tile_of_row(
                tile, x, data, scale, zero, None, None, at, end, inputs, row_words, groups, of_group, None, None, 0.0,
                FORMAT, TINY, None, SEGMENT, OUTPUTS, SEGMENTS,
            )  # fmt: skip
    y = tl.sum(tl.sum(total, 2), 1)
    if bias is not None:
        y += tl.load(bias + at, mask=at < end, other=0.0).to(tl.float32)
    return y


@triton.jit
def up_rows(
    x, index, out, data, scale, zero, bias, inputs, outputs, row_words, groups, of_group, routes, experts, first,
    FORMAT: tl.constexpr, TINY: tl.constexpr, SEGMENT: tl.constexpr, OUTPUTS: tl.constexpr, SEGMENTS: tl.constexpr,
    GATED: tl.constexpr, NAME: tl.constexpr, LIMIT: tl.constexpr, AFTER: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """out [tokens * routes, inner] = gate(up of the route's expert). Rows of experts out of range are not written."""
    route = tl.program_id(1)
    number = tl.load(index + route) - first
    if (number < 0) | (number >= experts):
        return
    expert = number.to(tl.int32)  # not before: large numbers would become those of experts
    x_row = x + (route // routes).to(tl.int64) * inputs
    wanted = outputs // 2 if GATED else outputs
    column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    start = expert * outputs
    gate = row_product(
        x_row, data, scale, zero, bias, start + column, start + wanted, inputs, row_words, groups, of_group,
        FORMAT, TINY, SEGMENT, OUTPUTS, SEGMENTS,
    )  # fmt: skip
    up = gate
    if GATED:
        up = row_product(
            x_row, data, scale, zero, bias, start + wanted + column, start + outputs, inputs, row_words, groups,
            of_group, FORMAT, TINY, SEGMENT, OUTPUTS, SEGMENTS,
        )  # fmt: skip
    y = through_gate(gate, up, GATED, NAME, LIMIT, AFTER, OFFSET)
    tl.store(out + route.to(tl.int64) * wanted + column, y.to(out.dtype.element_ty), mask=column < wanted)


@triton.jit
def down_rows(
    inner, index, weights, out, data, scale, zero, bias, inputs, outputs, row_words, groups, of_group, routes, experts,
    first, FORMAT: tl.constexpr, TINY: tl.constexpr, SEGMENT: tl.constexpr, OUTPUTS: tl.constexpr,
    SEGMENTS: tl.constexpr,
):  # fmt: skip
    """out [tokens, outputs] = the sum over a token's routes of weight * down of the route's expert."""
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    total = tl.zeros((OUTPUTS,), tl.float32)
    for k in range(0, routes):
        route = token * routes + k
        number = tl.load(index + route) - first
        if (number >= 0) & (number < experts):
            start = number.to(tl.int32) * outputs
            y = row_product(
                inner + route * inputs, data, scale, zero, bias, start + column, start + outputs, inputs,
                row_words, groups, of_group, FORMAT, TINY, SEGMENT, OUTPUTS, SEGMENTS,
            )  # fmt: skip
            total += y * tl.load(weights + route).to(tl.float32)
    tl.store(out + token * outputs + column, total.to(out.dtype.element_ty), mask=column < outputs)


@triton.jit
def tile_product(
    x_row, real, data, scale, zero, bias, at, end, inputs, row_words, groups, of_group,
    FORMAT: tl.constexpr, SEGMENT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SEGMENTS: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """The `real` rows of x times the rows `at` before `end` of the weight, plus bias: [OUTPUTS, ROWS] in float32."""
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for tile in range(0, tl.cdiv(tl.cdiv(inputs, SEGMENT), SEGMENTS)):
        total = add_tile(
            total, tile, x_row, real, data, scale, zero, None, None, at, end, inputs, row_words, groups, of_group,
            None, None, 0.0, FORMAT, None, SEGMENT, SEGMENTS, DTYPE,
        )  # fmt: skip
    if bias is not None:
        total += tl.load(bias + at, mask=at < end, other=0.0).to(tl.float32)[:, None]
    return total


@triton.jit
def up_tiles(
    x, order, expert_of, start_of, stop_of, out, data, scale, zero, bias,
    inputs, outputs, row_words, groups, of_group, tiles, routes, experts,
    FORMAT: tl.constexpr, SEGMENT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SEGMENTS: tl.constexpr,
    GATED: tl.constexpr, NAME: tl.constexpr, LIMIT: tl.constexpr, AFTER: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """out [sorted routes, inner] = gate(up of the route's expert). Rows of experts out of range are not written."""
    # Tiles of one expert are neighbours and vary fastest, so that concurrent programs share its weight in L2.
    tile, block = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    expert = tl.load(expert_of + tile).to(tl.int32)
    if expert >= experts:
        return
    place = tl.load(start_of + tile) + tl.arange(0, ROWS)
    real = place < tl.load(stop_of + tile)
    token = tl.load(order + place, mask=real, other=0) // routes
    x_row = x + token * inputs
    wanted = outputs // 2 if GATED else outputs
    column = block * OUTPUTS + tl.arange(0, OUTPUTS)
    start = expert * outputs
    gate = tile_product(
        x_row, real, data, scale, zero, bias, start + column, start + wanted, inputs, row_words, groups, of_group,
        FORMAT, SEGMENT, ROWS, OUTPUTS, SEGMENTS, x.dtype.element_ty,
    )  # fmt: skip
    up = gate
    if GATED:
        up = tile_product(
            x_row, real, data, scale, zero, bias, start + wanted + column, start + outputs, inputs, row_words, groups,
            of_group, FORMAT, SEGMENT, ROWS, OUTPUTS, SEGMENTS, x.dtype.element_ty,
        )  # fmt: skip
    y = through_gate(gate, up, GATED, NAME, LIMIT, AFTER, OFFSET)
    inside = real[None, :] & (column[:, None] < wanted)
    tl.store(out + place[None, :] * wanted + column[:, None], y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def down_tiles(
    inner, weights, order, expert_of, start_of, stop_of, out, data, scale, zero, bias,
    inputs, outputs, row_words, groups, of_group, tiles, experts,
    FORMAT: tl.constexpr, SEGMENT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """out [routes, outputs] = weight * down of the route's expert. `inner` is sorted, `weights` and `out` are not."""
    tile, block = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    expert = tl.load(expert_of + tile).to(tl.int32)
    if expert >= experts:
        return
    place = tl.load(start_of + tile) + tl.arange(0, ROWS)
    real = place < tl.load(stop_of + tile)
    route = tl.load(order + place, mask=real, other=0)
    column = block * OUTPUTS + tl.arange(0, OUTPUTS)
    start = expert * outputs
    y = tile_product(
        inner + place * inputs, real, data, scale, zero, bias, start + column, start + outputs, inputs, row_words,
        groups, of_group, FORMAT, SEGMENT, ROWS, OUTPUTS, SEGMENTS, inner.dtype.element_ty,
    )  # fmt: skip
    y *= tl.load(weights + route, mask=real, other=0.0).to(tl.float32)[None, :]
    inside = real[None, :] & (column[:, None] < outputs)
    tl.store(out + route[None, :] * outputs + column[:, None], y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def sum_routes(parts, index, out, width, routes, experts, first, BLOCK: tl.constexpr):
    """out [tokens, width] = the sum over routes of parts [tokens, routes, width], without experts out of range."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for route in range(0, routes):
        expert = tl.load(index + token * routes + route) - first + 0 * column  # the interpreter cannot mask by scalars
        inside = (column < width) & (expert >= 0) & (expert < experts)
        total += tl.load(parts + (token * routes + route) * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=column < width)
