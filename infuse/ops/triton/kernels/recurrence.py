"""The ops of recurrent mixers: a causal convolution, decays, the scan of linear attention, RMSNorm with a gate."""

import triton
import triton.language as tl

from infuse.ops.triton.kernels.activation import activated, sigmoid

# ---- a causal convolution ----


@triton.jit
def seen_rows(x, gate, state, at, channel, inside, x_t, gate_t, channels, TAPS: tl.constexpr):
    """Rows `at` [ROWS] of what the convolution sees, rounded as in the state, from which rows before 0 come."""
    here, new = at[:, None].to(tl.int64), inside & (at >= 0)[:, None]
    rows = tl.load(x + here * x_t + channel, mask=new, other=0.0)
    if gate is not None:
        factor = tl.load(gate + here * gate_t + channel, mask=new, other=0.0).to(tl.float32)
        rows = (rows.to(tl.float32) * factor).to(x.dtype.element_ty)
    if state is not None:
        old = inside & (at < 0)[:, None]
        before = tl.load(state + (here + TAPS) * channels + channel, mask=old, other=0.0)
        rows = tl.where(old, before, rows)
    return rows


@triton.jit
def convolve(
    x, weight, bias, state, gate, out_gate, y, after, tokens, channels, tiles, x_b, x_t, gate_b, gate_t, out_b, out_t,
    SILU: tl.constexpr, TAPS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One of `tiles` tiles of TOKENS tokens in a batch row; the last one also writes the state after them."""
    batch, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    token = tile * TOKENS + tl.arange(0, TOKENS)
    channel = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    real = channel < channels
    inside = real & (token < tokens)[:, None]
    x += batch * x_b
    if gate is not None:
        gate += batch * gate_b
    if state is not None:
        state += batch * TAPS * channels
    wide = tl.zeros((TOKENS, CHANNELS), tl.float32)
    if bias is not None:
        wide += tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)
    for j in tl.static_range(TAPS):
        rows = seen_rows(x, gate, state, token - (TAPS - 1 - j), channel, inside, x_t, gate_t, channels, TAPS)
        wide += tl.load(weight + channel * TAPS + j, mask=real, other=0.0).to(tl.float32) * rows.to(tl.float32)
    if SILU:
        wide = activated(wide, "silu")
    rounded = wide.to(y.dtype.element_ty)
    here = token[:, None].to(tl.int64)
    if out_gate is not None:
        factor = tl.load(out_gate + batch * out_b + here * out_t + channel, mask=inside, other=0.0).to(tl.float32)
        rounded = (rounded.to(tl.float32) * factor).to(y.dtype.element_ty)
    tl.store(y + (batch * tokens + here) * channels + channel, rounded, mask=inside)
    if tile == tiles - 1:
        for j in tl.static_range(TAPS):
            at = tokens - TAPS + j + tl.arange(0, 1)
            last = seen_rows(x, gate, state, at, channel, real, x_t, gate_t, channels, TAPS)
            tl.store(after + (batch * TAPS + j) * channels + channel, last, mask=real)


# ---- decays ----


@triton.jit
def softplus(x):
    """log(1 + exp(x)), small values exactly, too: log1p by Kahan's correction; x itself above 20, as in PyTorch."""
    e = tl.exp(tl.where(x > 20.0, 0.0, x))
    u = 1.0 + e
    y = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, y)


@triton.jit
def decays(
    step, beta, a_log, dt_bias, out, taken, rows, tokens, heads, least, most, factor, step_b, step_t, beta_b, beta_t,
    LIMITED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS tokens of all heads."""
    row, head = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)[None, :]
    real = head < heads
    inside = (row < rows)[:, None] & real
    batch, token = (row // tokens)[:, None], (row % tokens)[:, None]
    x = tl.load(step + batch * step_b + token * step_t + head, mask=inside, other=0.0).to(tl.float32)
    dt = softplus(x + tl.load(dt_bias + head, mask=real, other=0.0).to(tl.float32))
    if LIMITED:
        dt = tl.where(dt < least, least, tl.where(dt > most, most, dt))  # NaN stays
    rate = tl.exp(tl.load(a_log + head, mask=real, other=0.0).to(tl.float32))
    here = row[:, None] * heads + head
    tl.store(out + here, -rate * dt, mask=inside)
    if beta is not None:
        dt = factor * sigmoid(
            tl.load(beta + batch * beta_b + token * beta_t + head, mask=inside, other=0.0).to(tl.float32)
        )
    tl.store(taken + here, dt, mask=inside)


# ---- linear attention ----


@triton.jit
def normalised(x, NORMALISE: tl.constexpr):
    """x in float32, divided by its length if asked for."""
    x = x.to(tl.float32)
    if NORMALISE:
        x = x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)
    return x


@triton.jit
def token_at(
    t, q, k, v, decay, beta, d, c, columns, scale, q_t, k_t, v_t, heads, NORMALISE: tl.constexpr,
    BY_CHANNEL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The query, key, value, decay and beta of token t, in float32."""
    t = tl.cast(t, tl.int64)
    query = tl.load(q + t * q_t + d, mask=d < WIDTH, other=0.0)
    key = tl.load(k + t * k_t + d, mask=d < WIDTH, other=0.0)
    value = tl.load(v + t * v_t + c, mask=c < columns, other=0.0).to(tl.float32)
    if BY_CHANNEL:
        log = tl.load(decay + t * heads * WIDTH + d, mask=d < WIDTH, other=0.0).to(tl.float32)
    else:
        log = tl.load(decay + t * heads).to(tl.float32)
    b = tl.load(beta + t * heads).to(tl.float32)
    return normalised(query, NORMALISE) * scale, normalised(key, NORMALISE), value, tl.exp(log), b


@triton.jit
def without_padding(s, d, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """The state with zeros in its padded rows, also where zero was multiplied by infinity or NaN."""
    if PADDED > WIDTH:
        s = tl.where((d < WIDTH)[:, None], s, 0.0)
    return s


@triton.jit
def scan_tokens(
    q, k, v, decay, beta, skip, state, out, after, tokens, heads, each, columns, scale,
    q_b, q_t, q_g, k_b, k_t, k_g, v_b, v_t, v_h,
    NORMALISE: tl.constexpr, DELTA: tl.constexpr, BY_CHANNEL: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """All tokens of one head for COLUMNS columns of values, whose state [PADDED, COLUMNS] stays in registers.

    `each` heads share q and k. Each token is loaded and normalised while the one before it is computed.
    """
    blocks = tl.cdiv(columns, COLUMNS)
    place = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = place // heads, place % heads
    d, c = tl.arange(0, PADDED), (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    q += batch * q_b + (head // each) * q_g
    k += batch * k_b + (head // each) * k_g
    v += batch * v_b + head * v_h
    first = batch * tokens * heads + head
    decay += first * WIDTH if BY_CHANNEL else first
    beta += first
    out += first * columns
    at = place * WIDTH * columns + d[:, None] * columns + c[None, :]
    inside = (d < WIDTH)[:, None] & (c < columns)[None, :]
    s = tl.zeros((PADDED, COLUMNS), tl.float32)
    if state is not None:
        s = tl.load(state + at, mask=inside, other=0.0)
    factor = 0.0
    if skip is not None:
        factor = tl.load(skip + head).to(tl.float32)
    query, key, value, left, b = token_at(
        0, q, k, v, decay, beta, d, c, columns, scale, q_t, k_t, v_t, heads, NORMALISE, BY_CHANNEL, WIDTH
    )
    for t in range(tokens):
        next_query, next_key, next_value, next_left, next_b = token_at(
            tl.minimum(t + 1, tokens - 1), q, k, v, decay, beta, d, c, columns, scale, q_t, k_t, v_t, heads, NORMALISE,
            BY_CHANNEL, WIDTH,
        )  # fmt: skip
        if BY_CHANNEL:
            s = s * left[:, None]
        else:
            s = s * left
        s = without_padding(s, d, WIDTH, PADDED)
        change = value
        if DELTA:
            change = value - tl.sum(s * key[:, None], 0)
        s = without_padding(s + key[:, None] * (change * b)[None, :], d, WIDTH, PADDED)
        y = tl.sum(s * query[:, None], 0)
        if skip is not None:
            y += factor * value
        tl.store(out + tl.cast(t, tl.int64) * heads * columns + c, y.to(out.dtype.element_ty), mask=c < columns)
        query, key, value, left, b = next_query, next_key, next_value, next_left, next_b
    tl.store(after + at, s, mask=inside)


# ---- a norm with a gate ----


@triton.jit
def gated_norm_rows(
    x, gate, weight, out, rows, tokens, parts, width, weight_rows, gate_b, gate_t, eps, GATE_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS rows of x [rows, width], of which each token has `parts`; no weight: no norm."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    token, part = row // parts, row % parts
    inside = (row < rows)[:, None] & (column < width)
    here = row[:, None] * width + column
    of_gate = (token // tokens) * gate_b + (token % tokens) * gate_t + part * width
    y = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(gate + of_gate[:, None] + column, mask=inside, other=0.0).to(tl.float32)
    if SIGMOID:
        factor = sigmoid(factor)
    else:
        factor = activated(factor, "silu")
    if GATE_FIRST or weight is None:
        y = y * factor
    if weight is not None:
        y = y * tl.rsqrt(tl.sum(y * y, 1) / width + eps)[:, None]
        y = y * tl.load(weight + (part % weight_rows)[:, None] * width + column, mask=inside, other=0.0).to(tl.float32)
        if not GATE_FIRST:
            y = y * factor
    tl.store(out + here, y.to(out.dtype.element_ty), mask=inside)
