"""The names that transformers' configs give to activations, and ours for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

# transformers' ACT2FN → the `name` of the op `activation`. Those that differ only in rounding share one.
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
    """An activation by its own name, where no config key names it."""

    name: str
