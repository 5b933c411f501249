"""GroupNorm of ops/group_norm.py in three launches, for any strides of channels and positions.

Each channel is measured from its first value, so that a large common mean costs no digits.
"""

import triton
import triton.language as tl


@triton.jit
def sum_chunks(
    x, sums, channels, positions, channel_step, position_step, chunks, steps, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """Sums of (x - first value) and of its square over `steps` times CHUNK positions, for BLOCK channels."""
    sample = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    at = x + sample * channels * positions + channel * channel_step
    base = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for step in range(steps):
        position = ((chunk * steps + step) * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
        real = inside[None, :] & (position < positions)[:, None]
        wide = tl.load(at[None, :] + position[:, None] * position_step, mask=real, other=0.0).to(tl.float32)
        wide = tl.where(real, wide - base[None, :], 0.0)
        total += tl.sum(wide, 0)
        squares += tl.sum(wide * wide, 0)
    to = sums + (sample * chunks + chunk) * 2 * channels + channel
    tl.store(to, total, mask=inside)
    tl.store(to + channels, squares, mask=inside)


@triton.jit
def solve_groups(
    x, sums, weight, bias, added, scaled, added_step, channels, positions, channel_step, chunks, groups, eps,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From the sums of one group: y = (x - mean) * scale + bias for each of its channels."""
    sample = (tl.program_id(0) // groups).to(tl.int64)
    width = channels // groups
    column = tl.arange(0, BLOCK)
    inside = column < width
    channel = (tl.program_id(0) % groups) * width + column
    chunk = tl.arange(0, CHUNKS)
    there = (chunk < chunks)[:, None] & inside[None, :]
    at = sums + (sample * chunks + chunk)[:, None] * 2 * channels + channel[None, :]
    total = tl.sum(tl.load(at, mask=there, other=0.0), 0)
    squares = tl.sum(tl.load(at + channels, mask=there, other=0.0), 0) - total * total / positions
    base = tl.load(x + sample * channels * positions + channel * channel_step, mask=inside, other=0.0).to(tl.float32)
    more = tl.zeros((BLOCK,), tl.float32)
    if added is not None:
        more += tl.load(added + sample * added_step + channel, mask=inside, other=0.0).to(tl.float32)
    channel_mean = tl.where(inside, total / positions + base + more, 0.0)
    mean = tl.sum(channel_mean, 0) / width
    apart = tl.where(inside, channel_mean - mean, 0.0)
    variance = tl.sum(tl.where(inside, squares / positions, 0.0) + apart * apart, 0) / width
    scale = tl.zeros((BLOCK,), tl.float32) + tl.rsqrt(tl.where(variance < 0, 0.0, variance) + eps)
    if weight is not None:
        scale *= tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    shift = tl.zeros((BLOCK,), tl.float32)
    if bias is not None:
        shift += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    to = scaled + sample * 3 * channels + channel
    tl.store(to, mean - more, mask=inside)
    tl.store(to + channels, scale, mask=inside)
    tl.store(to + 2 * channels, shift, mask=inside)


@triton.jit
def apply_rows(
    x, scaled, y, channels, positions, channel_step, position_step, steps, SILU: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """y = act((x - mean) * scale + bias) for CHUNK positions of BLOCK channels."""
    sample = (tl.program_id(0) // steps).to(tl.int64)
    position = ((tl.program_id(0) % steps) * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    real = inside[None, :] & (position < positions)[:, None]
    of_channel = scaled + sample * 3 * channels + channel
    centre = tl.load(of_channel, mask=inside, other=0.0)
    scale = tl.load(of_channel + channels, mask=inside, other=0.0)
    shift = tl.load(of_channel + 2 * channels, mask=inside, other=0.0)
    here = sample * channels * positions + channel[None, :] * channel_step + position[:, None] * position_step
    wide = tl.load(x + here, mask=real, other=0.0).to(tl.float32) - centre[None, :]
    wide = wide * scale[None, :] + shift[None, :]
    if SILU:
        wide = wide / (1.0 + tl.exp(-wide))
    tl.store(y + here, wide.to(y.dtype.element_ty), mask=real)
