"""What the GPU tests share: the device, the mark that skips them elsewhere, and how near to the original a result must
be.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

CUDA = torch.device("cuda")
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

# Of the largest value of a result against the original in float32: whole models of three layers, whose errors add up.
OF_LARGEST: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2}
)


def moved(given: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Arguments on the device, what is not integers in `dtype`."""
    return {name: value.to(CUDA, dtype if value.is_floating_point() else None) for name, value in given.items()}


def first_tensor(output: Any) -> Tensor:
    """The logits, or what stands first."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, ModelOutput) and "logits" in output:
        return output["logits"]
    return first_tensor(output[0])


def error_of(found: Tensor, exact: Tensor) -> Tensor:
    """The largest error of each position, of the largest value: [B, T] of logits [B, T, V], one number of vectors."""
    errors = (found.double().cpu() - exact.double().cpu()).abs() / float(exact.abs().max())
    return errors.amax(dim=-1)


def assert_close(
    found: Tensor, exact: Tensor, dtype: torch.dtype, what: str = "", own: float = 0.0, routed: bool = False
) -> None:
    """`found`, computed in `dtype`, is near `exact`, the original in float32.

    `own`: the error of what the original computes in `dtype`; three times as much is allowed. `routed`: tokens choose
    experts. In 16 bits another rounding may choose another expert, in the original as in ours, and all later tokens see
    it: then only a quarter of the positions must be near.
    """
    assert found.shape == exact.shape and bool(torch.isfinite(found).all()), what
    allowed = max(OF_LARGEST[dtype], 3 * own)
    share = 0.25 if routed and dtype is not torch.float32 else 1.0
    error = float(error_of(found, exact).flatten().quantile(share))
    assert error <= allowed, f"{what}: off by {error:.1e} of the largest value, {allowed:.0e} is allowed"


def routes(model: nn.Module) -> bool:
    """Whether tokens choose experts."""
    return any("experts" in name for name, _ in model.named_modules())
