"""The selective scan: a state of several values for each channel, token by token."""

import triton
import triton.language as tl

from infuse.ops.triton.kernels.activation import activated
from infuse.ops.triton.kernels.recurrence import softplus


@triton.jit
def channels_at(t, x, dt, gate, bias, c, real, x_t, dt_t, gate_t):
    """x, the step and the gate's factor of token t, in float32."""
    t = tl.cast(t, tl.int64)
    value = tl.load(x + t * x_t + c, mask=real, other=0.0).to(tl.float32)
    step = softplus(tl.load(dt + t * dt_t + c, mask=real, other=0.0).to(tl.float32) + bias)
    factor = value
    if gate is not None:
        factor = activated(tl.load(gate + t * gate_t + c, mask=real, other=0.0).to(tl.float32), "silu")
    return value, step, factor


@triton.jit
def states_at(t, keys, queries, n, there, keys_t, queries_t):
    """The key and the query of token t, in float32."""
    t = tl.cast(t, tl.int64)
    key = tl.load(keys + t * keys_t + n, mask=there, other=0.0).to(tl.float32)
    return key, tl.load(queries + t * queries_t + n, mask=there, other=0.0).to(tl.float32)


@triton.jit
def scan_channels(
    x, dt, keys, queries, gate, a_log, dt_bias, skip, state, y, after, tokens, channels,
    x_b, x_t, dt_b, dt_t, keys_b, keys_t, queries_b, queries_t, gate_b, gate_t,
    STATES: tl.constexpr, PADDED: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """All tokens of CHANNELS channels, whose states [PADDED, CHANNELS] stay in registers.

    Each token is loaded while the one before it is computed.
    """
    blocks = tl.cdiv(channels, CHANNELS)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    n, c = tl.arange(0, PADDED), (tl.program_id(0) % blocks) * CHANNELS + tl.arange(0, CHANNELS)
    there, real = n < STATES, c < channels
    x += batch * x_b
    dt += batch * dt_b
    keys += batch * keys_b
    queries += batch * queries_b
    y += batch * tokens * channels
    if gate is not None:
        gate += batch * gate_b
    inside, of_weights = there[:, None] & real[None, :], c[None, :] * STATES + n[:, None]
    at = batch * channels * STATES + of_weights
    rate = -tl.exp(tl.load(a_log + of_weights, mask=inside, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias + c, mask=real, other=0.0).to(tl.float32)
    direct = tl.load(skip + c, mask=real, other=0.0).to(tl.float32)
    s = tl.zeros((PADDED, CHANNELS), tl.float32)
    if state is not None:
        s = tl.load(state + at, mask=inside, other=0.0)
    value, step, factor = channels_at(0, x, dt, gate, bias, c, real, x_t, dt_t, gate_t)
    key, query = states_at(0, keys, queries, n, there, keys_t, queries_t)
    for t in range(tokens):
        following = tl.minimum(t + 1, tokens - 1)
        next_value, next_step, next_factor = channels_at(following, x, dt, gate, bias, c, real, x_t, dt_t, gate_t)
        next_key, next_query = states_at(following, keys, queries, n, there, keys_t, queries_t)
        s = tl.exp(rate * step[None, :]) * s + (step * value)[None, :] * key[:, None]
        if PADDED > STATES:  # also where zero was multiplied by infinity or NaN
            s = tl.where(there[:, None], s, 0.0)
        out = tl.sum(s * query[:, None], 0) + direct * value
        if gate is not None:
            out = out * factor
        tl.store(y + tl.cast(t, tl.int64) * channels + c, out.to(y.dtype.element_ty), mask=real)
        value, step, factor, key, query = next_value, next_step, next_factor, next_key, next_query
    tl.store(after + at, s, mask=inside)
