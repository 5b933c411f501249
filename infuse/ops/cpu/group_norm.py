"""GroupNorm with SiLU in C++ (src/group_norm.h). The kernel returns None for unsupported arguments."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from infuse.native import kernels, needs
from infuse.ops.group_norm import group_norm


@group_norm.implement("cpu", needs)
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
    made = kernels().group_norm.default(x, weight, bias, added, groups, eps, silu, out)
    return group_norm.body("torch")(x, weight, bias, added, groups, eps, silu, out) if made is None else made
