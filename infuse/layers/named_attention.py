"""The attention function that a model's config names, where it is not one whose result our own op computes.

Such a function is "flex_attention", flash attention, or one that the user registered; or the call carries keyword arguments that only
such a function understands, as a paged cache of continuous batching does. A replaced layer still computes its own products, norms and
rotary positions, and hands q, k, v, the mask and every remaining keyword argument to that function, as the original attention does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from infuse.errors import UnsupportedCall

# Names of attention functions that compute what our op computes; names of our own hooks (layers/hook.py) start with "infuse_".
_SERVED = frozenset((None, "eager", "sdpa"))
_MISSING = object()
_dict_of = object.__getattribute__  # a config's own attribute access costs 1 us


def names_ours(attention: nn.Module) -> bool:
    """Whether the config of `attention` names an attention whose result our own op computes. Asked by every layer at every step."""
    config = attention.__dict__.get("config")
    if config is None:
        return True
    name = _dict_of(config, "__dict__").get("_attn_implementation_internal")
    return name in _SERVED or name.startswith("infuse_")


def named_attention(attention: nn.Module, keywords: Mapping[str, Any]) -> Callable:
    """The function that the original attention module would call now. UnsupportedCall where it does not call one by name."""
    name = attention.config._attn_implementation  # type: ignore[union-attr]
    scope = _scope(attention)
    if scope is None:
        kind = type(attention).__name__
        given = [key for key, value in keywords.items() if value is not None]
        asked = f"the keyword arguments {', '.join(given)}" if name in _SERVED else f'attn_implementation="{name}"'
        raise UnsupportedCall(
            f"{kind} was called with {asked}; it has an attention of its own, of which a replaced layer serves "
            '"eager" and "sdpa" and no further arguments: call model.set_attn_implementation("eager"), leave the arguments out, '
            "or run this call on the model before init_inference"
        )
    return scope.ALL_ATTENTION_FUNCTIONS.get_interface(name, getattr(scope, "eager_attention_forward", None))


def calls_by_name(attention: nn.Module) -> bool:
    """Whether the original attention module calls the function that its config names."""
    return _scope(attention) is not None


def attribute(attention: nn.Module, name: str) -> Any:
    """`name` of the attention module, or of its config."""
    found = attention.__dict__.get(name, _MISSING)
    return getattr(attention.__dict__.get("config"), name, None) if found is _MISSING else found


def _scope(attention: nn.Module) -> Any:
    """The file of transformers, or of the user, that looks attention functions up for this class."""
    files = (sys.modules.get(kind.__module__) for kind in type(attention).__mro__)
    return next((file for file in files if hasattr(file, "ALL_ATTENTION_FUNCTIONS")), None)
