"""GroupNorm with SiLU in Triton (kernels/group_norm.py): sums of chunks, coefficients of channels, result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infuse.ops.group_norm import group_norm
from infuse.ops.triton import kernels, needs
from infuse.ops.triton.configurations import MULTIPROCESSORS, power_above

CHUNK = 64  # positions that a program reads at once
MOST_CHANNELS = 128  # of one program
LARGEST_GROUP = 1 << 13  # sums (chunks times channels) of a group that one program adds up


def _strides(x: Tensor) -> tuple[int, int] | None:
    """The strides of channels and positions if x is channels last or contiguous without gaps, else None."""
    channels, positions = x.shape[1], x[0, 0].numel()
    if x.is_contiguous():
        return positions, 1
    moved = x.movedim(1, -1)
    return (1, channels) if moved.is_contiguous() else None


@group_norm.implement("triton", needs)
def _group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    added: Tensor | None,
    groups: int,
    eps: float,
    silu: bool,
    out: Tensor | None = None,
) -> Any:
    batch, channels = x.shape[:2]
    strides = _strides(x) if x.dim() > 2 and x.numel() else None
    vectors = [t for t in (weight, bias) if t is not None]
    if strides is None or any(not t.is_contiguous() for t in vectors) or (added is not None and added.stride(1) != 1):
        return group_norm.body("torch")(x, weight, bias, added, groups, eps, silu, out)
    positions, width = x.numel() // (batch * channels), channels // groups
    y = torch.empty_like(x) if out is None else out
    block = min(power_above(channels), MOST_CHANNELS)
    tiles = -(-channels // block)
    steps = -(-positions // CHUNK)  # of CHUNK positions
    most = max(LARGEST_GROUP // power_above(width), 1)
    chunks = max(min(steps, -(-2 * MULTIPROCESSORS // (batch * tiles)), most), 1)
    sums = torch.empty(batch, chunks, 2, channels, dtype=torch.float32, device=x.device)
    scaled = torch.empty(batch, 3, channels, dtype=torch.float32, device=x.device)
    module = kernels("group_norm")
    module.sum_chunks[(batch * chunks, tiles)](
        x, sums, channels, positions, *strides, chunks, -(-steps // chunks), CHUNK=CHUNK, BLOCK=block
    )
    module.solve_groups[(batch * groups,)](
        x, sums, weight, bias, added, scaled, 0 if added is None else added.stride(0), channels, positions, strides[0],
        chunks, groups, eps, CHUNKS=power_above(chunks), BLOCK=power_above(width),
    )  # fmt: skip
    module.apply_rows[(batch * steps, tiles)](
        x, scaled, y, channels, positions, *strides, steps, SILU=silu, CHUNK=CHUNK, BLOCK=block
    )
    return y
