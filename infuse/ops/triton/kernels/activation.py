"""The activations of ops/activation.py by name, and kernels that compute only an activation."""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -y, y)


@triton.jit
def activated(x, NAME: tl.constexpr):
    """The activation of float32 values; None is the identity."""
    if NAME == "silu":
        x = x / (1.0 + tl.exp(-x))
    elif NAME == "gelu":
        x = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    elif NAME == "gelu_tanh":
        x = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif NAME == "quick_gelu":
        x = x * sigmoid(1.702 * x)
    elif NAME == "relu":
        x = tl.where(x < 0, 0.0, x)  # NaN stays
    elif NAME == "relu2":
        x = tl.where(x < 0, 0.0, x)
        x = x * x
    elif NAME == "tanh":
        x = tanh(x)
    else:
        tl.static_assert(NAME is None, "an unknown activation")
    return x


@triton.jit
def activate(x, out, values, NAME: tl.constexpr, BLOCK: tl.constexpr):
    """out[i] = act(x[i])."""
    here = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wide = tl.load(x + here, mask=here < values).to(tl.float32)
    tl.store(out + here, activated(wide, NAME).to(out.dtype.element_ty), mask=here < values)


@triton.jit
def activate_gated(gate_up, out, inner, NAME: tl.constexpr, BLOCK: tl.constexpr):
    """out[r, i] = act(gate_up[r, i]) * gate_up[r, inner + i]."""
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    gate = tl.load(gate_up + row * 2 * inner + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + column, mask=inside).to(tl.float32)
    tl.store(out + row * inner + column, (activated(gate, NAME) * up).to(out.dtype.element_ty), mask=inside)
