"""Rotary factors of a GGUF file (`rope_freqs`) as rope_parameters of transformers: Llama 3.1's, or any by longrope.

frequency i = base**(-2i / width) / factors[i]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

# Tensors of factors for short and for long texts, which only phi3's files have.
FACTORS: Mapping[str, str] = MappingProxyType({
    "short": "rope_factors_short.weight", "long": "rope_factors_long.weight",
})  # fmt: skip
# Of Llama 3.1 to 3.3, with factors of 8 and 32; the files hold only what comes of them.
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192
_CLOSE = 1e-4  # relative: factors are computed in float32, by several formulas


def rope_parameters(factors: Tensor, theta: float, context: int) -> dict[str, Any]:
    """The rope_parameters that divide each frequency to the base `theta` by its one of `factors`.

    `context`: tokens that the model was made for.
    """
    plain = {"rope_type": "default", "rope_theta": theta}
    factors = factors.double()
    if bool((factors == 1).all()):
        return plain
    largest = float(factors.max())
    if torch.allclose(factors, _of_llama3(len(factors), theta, largest), rtol=_CLOSE, atol=0):
        ends = {"low_freq_factor": _LOW, "high_freq_factor": _HIGH}
        return plain | {"rope_type": "llama3", "factor": largest, "original_max_position_embeddings": _ORIGINAL} | ends
    both = {"short_factor": factors.tolist(), "long_factor": factors.tolist()}
    return (
        plain | {"rope_type": "longrope", "original_max_position_embeddings": context, "attention_factor": 1.0} | both
    )


def _of_llama3(count: int, theta: float, factor: float) -> Tensor:
    """What Llama 3.1 divides the frequencies by: nothing, the factor, or a mean of both by wavelength. float64"""
    lengths = 2 * math.pi * theta ** (torch.arange(count, dtype=torch.float64) / count)
    smooth = ((_ORIGINAL / lengths - _LOW) / (_HIGH - _LOW)).clamp(0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
