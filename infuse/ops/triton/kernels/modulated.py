"""The gated sums and modulated norms of ops/modulated.py, one program per row."""

import triton
import triton.language as tl


@triton.jit
def modulated_rows(
    x, gate, residual, scale, shift, total, out, tokens, columns, gate_b, scale_b, shift_b, eps, CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """total = residual + gate * x if there is a gate; out = norm(x or total) * (1 + scale) + shift if a scale: a layer
    norm if CENTRED, else an RMS norm.
    """
    row = tl.program_id(0).to(tl.int64)
    batch = row // tokens
    column = tl.arange(0, BLOCK)
    inside = column < columns
    here = row * columns + column
    wide = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
    if gate is not None:
        factor = tl.load(gate + batch * gate_b + column, mask=inside, other=0.0).to(tl.float32)
        summed = tl.load(residual + here, mask=inside, other=0.0).to(tl.float32) + factor * wide
        summed = summed.to(total.dtype.element_ty)
        tl.store(total + here, summed, mask=inside)
        wide = summed.to(tl.float32)
    if scale is not None:
        if CENTRED:
            wide = tl.where(inside, wide - tl.sum(wide, 0) / columns, 0.0)
        y = wide * tl.rsqrt(tl.sum(wide * wide, 0) / columns + eps)
        y = y * (1.0 + tl.load(scale + batch * scale_b + column, mask=inside, other=0.0).to(tl.float32))
        y += tl.load(shift + batch * shift_b + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + here, y.to(out.dtype.element_ty), mask=inside)
