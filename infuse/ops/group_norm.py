"""GroupNorm, with an addition for each channel before it and SiLU after it, in one op.

Suffixes: B batch, C channels, S any number of spatial axes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from infuse.ops.op import Case, op


@op("group_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor? added, int groups, float eps, bool silu) -> Tensor")
def group_norm(
    x_BCS: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    added_BC: Tensor | None,
    groups: int,
    eps: float,
    silu: bool,
    out: Tensor | None = None,
) -> Tensor:
    """act(norm(x + added) * weight + bias), over the positions of each group of channels, in x.dtype.

    Computed in float32 (Wu and He 2018). act is SiLU if `silu`, else nothing. weight and bias [C]. The result of a body
    called directly lies in memory as x does, channels last or contiguous. Such a call also takes `out`, a tensor like x
    to write to, which may be x itself.
    """
    wide = x_BCS.float()
    if added_BC is not None:
        wide = wide + _spread(added_BC.float(), x_BCS)
    batch, channels = x_BCS.shape[:2]
    grouped = wide.reshape(batch, groups, channels // groups, -1)
    grouped = grouped - grouped.mean((2, 3), keepdim=True)
    y = (grouped * torch.rsqrt(grouped.pow(2).mean((2, 3), keepdim=True) + eps)).reshape(x_BCS.shape)
    if weight is not None:
        y = y * _spread(weight.float()[None], x_BCS)
    if bias is not None:
        y = y + _spread(bias.float()[None], x_BCS)
    y = (F.silu(y) if silu else y).to(x_BCS.dtype)
    return y if out is None else out.copy_(y)


def _spread(of_channels: Tensor, x: Tensor) -> Tensor:
    """[.., C] with the spatial axes of x."""
    return of_channels.reshape(*of_channels.shape, *(1,) * (x.dim() - 2))


@group_norm.implement("torch")
def _group_norm_torch(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    added: Tensor | None,
    groups: int,
    eps: float,
    silu: bool,
    out: Tensor | None = None,
) -> Tensor:
    y = F.group_norm(x if added is None else x + _spread(added, x), groups, weight, bias, eps)
    y = F.silu(y, inplace=True) if silu else y
    return y if out is None else out.copy_(y)


@group_norm.fake
def _like_x(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@group_norm.cases
def _cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for shape, groups in (
        ((2, 32, 3, 5), 8),
        ((1, 96, 7, 9), 32),
        ((2, 40, 1, 1), 4),
        ((3, 6, 33), 2),
        ((1, 64, 12, 11), 1),
        ((2, 20, 4, 4), 20),
        ((1, 160, 50, 40), 32),
    ):
        x = torch.randn(shape, dtype=dtype, device=device) * 2 + 1
        weight, bias = (torch.randn(shape[1], dtype=dtype, device=device) for _ in range(2))
        added = torch.randn(shape[0], 2 * shape[1], dtype=dtype, device=device)[:, shape[1] :]
        last = x if x.dim() == 3 else x.contiguous(memory_format=torch.channels_last)
        yield Case(f"{shape} in {groups}", (x, weight, bias, None, groups, 1e-5, False))
        yield Case(f"{shape} in {groups}, channels last, SiLU", (last, weight, bias, None, groups, 1e-6, True))
        yield Case(f"{shape} in {groups}, added, SiLU", (x, weight, bias, added, groups, 1e-5, True))
        yield Case(f"{shape} in {groups}, channels last, added", (last, None, None, added, groups, 1e-5, False))
