"""RMSNorm and LayerNorm of ops/norm.py, one program for each row, the residual addition before it included."""

import triton
import triton.language as tl


@triton.jit
def norm_rows(
    x, residual, weight, bias, out, total, heads, columns, eps, offset, CENTRED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Row r of x [R, columns], and of residual where there is one, normalised; it takes the weights r % heads of [heads, columns]."""
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
    of_head = (row % heads) * columns + column
    if weight is not None:
        y = y * (tl.load(weight + of_head, mask=inside, other=0.0).to(tl.float32) + offset)
    if bias is not None:
        y = y + tl.load(bias + of_head, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + here, y.to(out.dtype.element_ty), mask=inside)
