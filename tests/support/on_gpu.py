"""What the GPU tests share: the device, the mark that skips them elsewhere, and how near to the original a result must
be.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
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


def assert_close(found: Tensor, exact: Tensor, dtype: torch.dtype, what: str = "") -> None:
    """`found`, computed in `dtype`, is near `exact`, the original in float32."""
    assert found.shape == exact.shape and bool(torch.isfinite(found).all()), what
    error = float((found.double().cpu() - exact.double().cpu()).abs().max()) / float(exact.abs().max())
    assert error <= OF_LARGEST[dtype], (
        f"{what}: off by {error:.1e} of the largest value, {OF_LARGEST[dtype]:.0e} is allowed"
    )
