"""Answers of a model with an encoder: our caches in the pair that transformers makes."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from infuse.cache.encoded_slot import StatesCache
from infuse.cache.kv_cache import KVCache
from infuse.generate.loop import CACHE_NAME
from infuse.ground.authors import is_librarys
from infuse.ground.cache_names import cache_in
from infuse.ground.instance_method import InstanceMethod, while_it_has
from infuse.ground.questions import attribute, returned

PREPARES = "_prepare_cache_for_generation"  # the method of transformers in which `generate` makes its caches
_DYNAMIC = ("DynamicLayer", "DynamicSlidingWindowLayer")  # ours keeps tokens outside of a window, which masks hide


class PairCache(EncoderDecoderCache):
    """An EncoderDecoderCache whose halves are ours."""

    def check_dynamic_cache(self, method: str) -> None:
        """Do nothing: our halves crop, repeat and select as a DynamicCache does."""

    def reorder_cache(self, beam_idx: Any) -> None:
        ours: Any = self.self_attention_cache
        ours.reorder_in_place(beam_idx)
        self.cross_attention_cache.reorder_cache(beam_idx)


def install_pair(module: nn.Module) -> None:
    """Let all ways of transformers' `generate` begin with our cache, also those that a model's class adds (Whisper)."""
    if is_pair(module) and is_librarys(getattr(type(module), PREPARES, None)):
        setattr(module, PREPARES, InstanceMethod(prepare_cache, module, PREPARES))


def is_pair(module: Any) -> bool:
    """Whether a model reads states of an encoder of its own."""
    return bool(attribute(module, "config.is_encoder_decoder"))


def encoders_in(module: Any) -> list[str]:
    """The path of the encoder that `generate` runs before the decoder's steps, in a list; an empty one without any."""
    encoder = returned(module, "get_encoder") if is_pair(module) else None
    return [path for path, part in module.named_modules() if part is encoder and part is not module]


@while_it_has("_infuse", PREPARES)
def prepare_cache(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Prepare the cache as the model's class does, and put ours in the place of new dynamic ones.

    One that the caller gave, or asked for, stays.
    """
    callers = cache_in(model_kwargs) is not None or generation_config.cache_implementation not in (None, "dynamic")
    result = getattr(type(self), PREPARES)(self, generation_config, model_kwargs, *args, **kwargs)
    cache = model_kwargs.get(CACHE_NAME)
    if not callers and type(cache) is EncoderDecoderCache and _is_new(cache.self_attention_cache):
        theirs, limit, format = cache.cross_attention_cache, self._infuse.limit_tokens, self._infuse.kv_cache
        states = StatesCache(format) if _is_new(theirs) else theirs
        model_kwargs[CACHE_NAME] = PairCache(KVCache(limit_tokens=limit, format=format), states)
    return result


def _is_new(cache: Any) -> bool:
    """Whether it is a cache of transformers' that grows, and holds no token yet."""
    layers = getattr(cache, "layers", ())
    return type(cache) is DynamicCache and all(
        type(layer).__name__ in _DYNAMIC and not layer.is_initialized for layer in layers
    )
