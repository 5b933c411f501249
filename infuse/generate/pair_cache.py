"""Answers of a model with an encoder: our cache for its decoder's tokens, in the pair that transformers makes."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from infuse.authors import is_librarys
from infuse.generate.loop import CACHE_NAME
from infuse.layers.cache import KVCache

PREPARES = "_prepare_cache_for_generation"  # the method of transformers in which `generate` makes its caches
_PLAIN = "DynamicLayer"


class PairCache(EncoderDecoderCache):
    """An EncoderDecoderCache whose first half is ours."""

    def check_dynamic_cache(self, method: str) -> None:
        """Do nothing: our half crops, repeats and selects as a DynamicCache does."""


def install_pair(module: nn.Module) -> None:
    """Let all ways of transformers' `generate` begin with our cache, also those that a model's class adds (Whisper)."""
    is_pair = getattr(getattr(module, "config", None), "is_encoder_decoder", False)
    if is_pair and is_librarys(getattr(type(module), PREPARES, None)):
        setattr(module, PREPARES, partial(prepare_cache, module))


def prepare_cache(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Prepare the cache as the model's class does, and put ours in the place of a new dynamic one."""
    result = getattr(type(self), PREPARES)(self, generation_config, model_kwargs, *args, **kwargs)
    cache = model_kwargs.get(CACHE_NAME)
    if type(cache) is EncoderDecoderCache and _is_new(cache.self_attention_cache):
        ours = KVCache(format=self._infuse.kv_cache)
        model_kwargs[CACHE_NAME] = PairCache(ours, cache.cross_attention_cache)
    return result


def _is_new(cache: Any) -> bool:
    """Whether it is a cache of transformers' that keeps all tokens, and holds none yet."""
    layers = getattr(cache, "layers", ())
    return type(cache) is DynamicCache and all(
        type(layer).__name__ == _PLAIN and not layer.is_initialized for layer in layers
    )
