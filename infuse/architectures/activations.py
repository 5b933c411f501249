"""Map the activation names of transformers' configs to our own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

# Key of transformers' ACT2FN → `name` argument of the op `activation`. Keys that differ only in rounding share one.
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
