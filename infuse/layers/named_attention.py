"""Call the attention function that a model's config names, if our own op does not compute the same.

That is flex_attention, flash attention or a function that the user registered; also sdpa with the paged cache of
continuous batching. A replaced layer still computes its own products, norms and rotary positions, and passes q, k, v,
the mask and all remaining keyword arguments to that function, as the original attention does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from infuse.architectures.attention import NO_ATTRIBUTE
from infuse.errors import UnsupportedCall
from infuse.layers.contract import refuse_arguments, unserved

# Attention functions that compute what our op computes. Our own hooks (layers/hook.py) start with "infuse_".
_SERVED_NAMES = frozenset((None, "eager", "sdpa"))
# Arguments that the layer consumes. The attention function gets the mask by position.
_CONSUMED = frozenset(("attention_mask", "past_key_values", "layer_past", "position_embeddings"))
_PAGED_CACHE = "cache"
_MISSING = object()
_read = object.__getattribute__  # a config's own attribute access takes 1 us


def names_ours(attention: nn.Module) -> bool:
    """Whether our own op computes the attention that the config of `attention` names. Runs in every layer and step."""
    config = attention.__dict__.get("config")
    if config is None:
        return True
    name = _read(config, "__dict__").get("_attn_implementation_internal")
    return name in _SERVED_NAMES or name.startswith("infuse_")


def arguments_of_named(
    attention: nn.Module, kwargs: Mapping[str, Any], served: frozenset[str], own: tuple[str, ...], layer: str
) -> Mapping[str, Any] | None:
    """Return the keyword arguments for the attention function that the config names; None to call our own op.

    `own` are the layer's own arguments. Raise UnsupportedCall if neither the layer nor that function supports one.
    """
    ours, more = names_ours(attention), unserved(kwargs, served)
    if ours and not more:
        return None
    by_name = calls_by_name(attention)
    if more and (not by_name or not more.keys().isdisjoint(own) or (ours and _PAGED_CACHE not in more)):
        refuse_arguments(layer, more, served)
    if not by_name:
        name = attention.config._attn_implementation  # type: ignore[union-attr]
        raise UnsupportedCall(
            f'{layer} was called while the config names the attention "{name}"; its attention '
            'never calls one by name, and its replacement supports only "eager" and "sdpa": call '
            "model.set_attn_implementation with one of these"
        )
    kept = _CONSUMED.union(name for name in own if name not in served)
    return {name: value for name, value in kwargs.items() if name not in kept}


def named_attention(attention: nn.Module) -> Callable:
    """Return the function that the original attention module would call now."""
    scope = _scope(attention)
    return scope.ALL_ATTENTION_FUNCTIONS.get_interface(
        attention.config._attn_implementation,  # type: ignore[union-attr]
        getattr(scope, "eager_attention_forward", None),
    )


def calls_by_name(attention: nn.Module) -> bool:
    """Whether the original attention module calls the function that its config names."""
    return _scope(attention) is not None


def attribute(attention: nn.Module, name: str) -> Any:
    """Look up `name` in the attention module, its parameters too, then in its config. None for NO_ATTRIBUTE."""
    if name == NO_ATTRIBUTE:
        return None
    found = attention.__dict__.get(name, attention._parameters.get(name, _MISSING))
    return getattr(attention.__dict__.get("config"), name, None) if found is _MISSING else found


def _scope(attention: nn.Module) -> Any:
    """Return the module of transformers, or of the user, in which this class looks up attention functions."""
    files = (sys.modules.get(kind.__module__) for kind in type(attention).__mro__)
    return next((file for file in files if hasattr(file, "ALL_ATTENTION_FUNCTIONS")), None)
