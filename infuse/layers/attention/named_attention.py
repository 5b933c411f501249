"""Call the attention function that a model's config names, if it differs from our op.

That is flex_attention, flash attention or a function that the user registered, also under the name of transformers' own
one; and sdpa with the paged cache of continuous batching. A replaced layer still computes its own products, norms and
rotary positions, and passes q, k, v, the mask and all remaining keyword arguments to that function, as the original
attention does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from torch import nn

from infuse.architectures.layer import NOTHING_UNREAD, Unread
from infuse.architectures.parts.attention import NO_ATTRIBUTE
from infuse.ground.authors import is_librarys
from infuse.ground.cache_names import CACHE, CACHE_NAMES, LAYERS_PAGE, cache_in
from infuse.ground.errors import UnsupportedCall
from infuse.layers.calls.contract import refuse_arguments, unserved

# Names of attention functions equal to our op, if they are transformers' own, and the variable with the default if
# nothing is registered. Our hooks (layers/attention/hook.py) start with "infuse_".
_EAGER = "eager_attention_forward"
_SERVED_NAMES: Mapping[str | None, str] = {None: _EAGER, "eager": _EAGER, "sdpa": ""}
# Arguments that the layer consumes. The attention function takes the mask by position.
_CONSUMED = frozenset(("attention_mask", *CACHE_NAMES, "position_embeddings"))
_PAGED_CACHE = "PagedAttentionCache"  # importing it takes long
_FUNCTIONS = "ALL_ATTENTION_FUNCTIONS"
_MISSING = object()
_read = object.__getattribute__  # a config's own attribute access takes 1 us


def names_ours(attention: nn.Module) -> bool:
    """Whether our op computes the attention that the config of `attention` names. Runs in every layer and step."""
    config = attention.__dict__.get("config")
    if config is None or attention.__dict__.get("by_name") is False:
        return True
    name = _read(config, "__dict__").get("_attn_implementation_internal")
    if name not in _SERVED_NAMES:
        return name.startswith("infuse_")
    kind: Any = type(attention)
    scope = _scope(kind)
    return scope is None or is_transformers_own(scope[_FUNCTIONS], name, scope.get(_SERVED_NAMES[name]))


def is_transformers_own(functions: Any, name: str | None, default: Any = None) -> bool:
    """Whether the function registered under `name` (else `default`) is transformers' own."""
    function = functions._local_mapping.get(name)
    if function is None:
        function = functions._global_mapping.get(name, default)
    return function is None or _computes(function, name or "eager")


@lru_cache(maxsize=64)
def _computes(function: Any, name: str) -> bool:
    return is_librarys(function) and name in getattr(function, "__name__", "")


def arguments_of_named(
    attention: nn.Module,
    kwargs: Mapping[str, Any],
    served: frozenset[str],
    arguments: tuple[str, ...],
    layer: str,
    unread: Unread = NOTHING_UNREAD,
) -> Mapping[str, Any] | None:
    """Return the keyword arguments for the attention function that the config names; None to call our own op.

    `arguments`: the layer's own arguments. `unread`: keywords that nothing in the original looks at, that function
    apart. Raise UnsupportedCall if neither the layer nor that function supports one.
    """
    ours, more, paged = names_ours(attention), unserved(kwargs, served), is_paged(cache_in(kwargs))
    ignored = unread.by_plain if ours and not paged else unread.__contains__
    more = {name: value for name, value in more.items() if not ignored(name)}
    if ours and not more:
        return None
    by_name = calls_by_name(attention)
    if more and (not by_name or not more.keys().isdisjoint(arguments) or (ours and not paged)):
        refuse_arguments(layer, more, served)
    if not by_name:
        name = attention.config._attn_implementation  # type: ignore[union-attr]
        raise UnsupportedCall(
            f'{layer} was called while the config names the attention "{name}"; its attention '
            'never calls one by name, and its replacement supports only "eager" and "sdpa": call '
            "model.set_attn_implementation with one of these"
        )
    consumed = _CONSUMED - {CACHE} if paged and not LAYERS_PAGE else _CONSUMED
    kept = consumed.union(name for name in arguments if name not in served)
    return {name: value for name, value in kwargs.items() if name not in kept}


def is_paged(cache: Any) -> bool:
    """Whether this is the cache of continuous batching, which changes the arguments of attention functions."""
    return cache is not None and any(kind.__name__ == _PAGED_CACHE for kind in type(cache).__mro__)


def paged_cache(cache: Any) -> Any:
    """Return the cache of continuous batching if layers call it; None if the attention function does."""
    return cache if LAYERS_PAGE else None


def named_attention(attention: nn.Module) -> Callable:
    """Return the function that the original attention module would call now."""
    kind: Any = type(attention)
    scope = _scope(kind)
    assert scope is not None
    return scope[_FUNCTIONS].get_interface(
        attention.config._attn_implementation,  # type: ignore[union-attr]
        scope.get(_EAGER),
    )


def calls_by_name(attention: nn.Module) -> bool:
    """Whether the original attention module calls the function that its config names."""
    kind: Any = type(attention)
    return attention.__dict__.get("by_name") is not False and _scope(kind) is not None


def attribute(attention: nn.Module, name: str) -> Any:
    """Look up `name` in the attention module and its parameters, then in its config. None for NO_ATTRIBUTE."""
    if name == NO_ATTRIBUTE:
        return None
    value = attention.__dict__.get(name, attention._parameters.get(name, _MISSING))
    return getattr(attention.__dict__.get("config"), name, None) if value is _MISSING else value


@lru_cache(maxsize=256)
def _scope(attention: Any) -> dict[str, Any] | None:
    """Return the globals of the module in which this class looks up attention functions; None if there is none."""
    files = (sys.modules.get(kind.__module__) for kind in attention.__mro__)
    return next((vars(file) for file in files if hasattr(file, _FUNCTIONS)), None)
