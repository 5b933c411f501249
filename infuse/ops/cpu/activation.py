"""The activations of ops/activation.py in C++ (src/activation.h). A kernel returns None for unsupported arguments."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from infuse.native import kernels, needs
from infuse.ops.activation import activation, gated_activation

# The order of `enum class Act` in src/types.h.
ACTIVATION_NUMBERS: Mapping[str, int] = MappingProxyType(
    {name: i for i, name in enumerate(("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "tanh"))}
)


@activation.implement("cpu", needs)
def _activation(x: Tensor, name: str) -> Any:
    out = kernels().activation.default(x, ACTIVATION_NUMBERS[name])
    return activation.reference(x, name) if out is None else out


@gated_activation.implement("cpu", needs)
def _gated_activation(gate_up: Tensor, name: str) -> Any:
    out = kernels().gated_activation.default(gate_up, ACTIVATION_NUMBERS[name])
    return gated_activation.reference(gate_up, name) if out is None else out
