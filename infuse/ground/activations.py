"""Activations in plain PyTorch, the names that transformers' configs have for them, and the gate of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": partial(F.gelu, approximate="tanh"),
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),  # Hendrycks and Gimpel 2016, the sigmoid form
        "relu": F.relu,
        "relu2": lambda x: F.relu(x).square(),  # So et al. 2021 (Primer)
        "tanh": torch.tanh,
    }
)

# Key of transformers' ACT2FN → key of FUNCTIONS. Keys that differ only in rounding share one.
ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {
        **{name: name for name in ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "tanh")},
        **dict.fromkeys(
            ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate"), "gelu_tanh"
        ),
        "gelu_python": "gelu",
        "swish": "silu",
    }
)


@dataclass(frozen=True)
class Act:
    """An activation fixed by the spec, for layers whose config has no key for it."""

    name: str


class ExpertGate(NamedTuple):
    """The step between an expert's two products: the optional arguments of both ops, in order.

    Gated: act(gate) * (up + up_offset), otherwise act(up). With limit > 0, the gate is clamped to at most `limit` and
    up to ± limit before the activation, or, with `limit_after`, act(gate) is clamped instead of the gate.
    `first` is the number of the first expert in the matrices.
    """

    activation: str
    gated: bool = True
    limit: float = 0.0
    limit_after: bool = False
    up_offset: float = 0.0
    first: int = 0

    def inner(self, h: Tensor) -> Tensor:
        """[..., U] → [..., I], in the dtype of `h`."""
        if not self.gated:
            return FUNCTIONS[self.activation](h)
        gate, up = h.chunk(2, dim=-1)
        if self.limit > 0:
            up = up.clamp(-self.limit, self.limit)
            if not self.limit_after:
                gate = gate.clamp(max=self.limit)
        gate = FUNCTIONS[self.activation](gate)
        if self.limit > 0 and self.limit_after:
            gate = gate.clamp(max=self.limit)
        return gate * (up + self.up_offset) if self.up_offset else gate * up
