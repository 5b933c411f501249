"""Multiply tensors by a part's multipliers (architectures/parts/multipliers.py); round after each as originals do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infuse.architectures.parts.multipliers import Factors


def times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


def times_sections(x: Tensor, factors: Factors, widths: Sequence[int]) -> Tensor:
    """Multiply the sections of x [..., sum of the widths], each by its factor."""
    if set(factors.sections) <= {1.0}:
        return x
    pairs = list(zip(widths, factors.sections, strict=True))
    if factors.rounded:
        return x * torch.cat([x.new_full((width,), factor) for width, factor in pairs])
    return torch.cat([times(part, factor) for part, (_, factor) in zip(x.split([*widths], -1), pairs, strict=True)], -1)
