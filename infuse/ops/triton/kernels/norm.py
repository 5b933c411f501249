"""RMSNorm and LayerNorm of ops/norm.py with the preceding residual addition, one program per row.

Also the parts of them for products that normalise the rows they read.
"""

import triton
import triton.language as tl


@triton.jit
def scaled(y, weight, bias, at, inside, offset):
    """y * (offset + weight[at]) + bias[at] in float32; weight and bias may be None."""
    if weight is not None:
        y = y * (tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) + offset)
    if bias is not None:
        y = y + tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    return y


@triton.jit
def moments(x_row, real, columns, eps, NORM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The means (0 for an RMS norm) and 1 / standard deviations of the rows, [ROWS] each.

    `x_row` [ROWS] points to the rows; `real` marks the valid ones. Reads BLOCK columns at once; nothing without NORM.
    """
    mean = tl.zeros((ROWS,), tl.float32)
    inverse = tl.zeros((ROWS,), tl.float32)
    if NORM is not None:
        block = tl.arange(0, BLOCK)[None, :]
        if NORM == "layer":
            sums = tl.zeros((ROWS, BLOCK), tl.float32)
            for start in range(0, columns, BLOCK):
                inside = real[:, None] & (start + block < columns)
                sums += tl.load(x_row[:, None] + start + block, mask=inside, other=0.0).to(tl.float32)
            mean = tl.sum(sums, 1) / columns
        squares = tl.zeros((ROWS, BLOCK), tl.float32)
        for start in range(0, columns, BLOCK):
            inside = real[:, None] & (start + block < columns)
            wide = tl.load(x_row[:, None] + start + block, mask=inside, other=0.0).to(tl.float32)
            wide = tl.where(inside, wide - mean[:, None], 0.0)
            squares += wide * wide
        inverse = tl.rsqrt(tl.sum(squares, 1) / columns + eps)
    return mean, inverse


@triton.jit
def norm_rows(
    x, residual, weight, bias, out, total, heads, columns, eps, offset, CENTRED: tl.constexpr, BLOCK: tl.constexpr
):
    """Normalise row r of x [R, columns], plus the residual if any, with weights r % heads of [heads, columns]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    here = row * columns + column
    wide = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        summed = (wide + tl.load(residual + here, mask=inside, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + here, summed, mask=inside)
        wide = summed.to(tl.float32)
    if CENTRED:
        wide = tl.where(inside, wide - tl.sum(wide, 0) / columns, 0.0)
    y = wide * tl.rsqrt(tl.sum(wide * wide, 0) / columns + eps)
    y = scaled(y, weight, bias, (row % heads) * columns + column, inside, offset)
    tl.store(out + here, y.to(out.dtype.element_ty), mask=inside)
