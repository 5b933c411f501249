"""What transformers calls the cache of a call: "cache" since 5.24, "past_key_values" before, and "layer_past" in a few
layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from packaging.version import Version

CACHE, FORMER = "cache", "past_key_values"
CACHE_NAMES = (CACHE, FORMER, "layer_past")

# Whether layers call the cache of continuous batching. Before, they pass it through to the attention function.
LAYERS_PAGE = Version(version("transformers")) >= Version("5.24")


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a call by name; None if there is none."""
    for name in CACHE_NAMES:
        cache = arguments.get(name)
        if cache is not None:
            return cache
    return None


@lru_cache(maxsize=256)
def cache_argument(function: Callable[..., Any]) -> str | None:
    """The name under which `function` takes a cache; None if it takes none."""
    parameters = inspect.signature(function).parameters
    return next((name for name in CACHE_NAMES if name in parameters), None)
