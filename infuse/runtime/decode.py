"""What is installed on the model: `generate` with our cache, the cap on tokens, and inputs brought to the model's device.

transformers' own `generate` prepares, loops and returns; all of its modes run over our blocks. Everything here is an
attribute or a hook of the module itself, so that it works however the module is called, and copies with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from infuse.errors import ContextLimitError
from infuse.layers.cache import KVCache

# What `generate` prepares room for at first; a longer answer grows the cache by doubling.
_PREPARED_TOKENS = 512


@dataclass(frozen=True)
class Installed:
    """What `install` put on a module. `limit_tokens` caps prompt + answer; `min_new_tokens` must fit below it."""

    limit_tokens: int | None
    min_new_tokens: int
    caches: bool


def install(module: nn.Module, *, limit_tokens: int | None, min_new_tokens: int, caches: bool) -> list[RemovableHandle]:
    """Put generate, cap and device care on `module`. `caches`: its layers take our cache. Returns the hooks' handles."""
    module._infuse = Installed(limit_tokens, min_new_tokens, caches)  # type: ignore[assignment]
    if hasattr(type(module), "generate"):
        module.generate = MethodType(generate, module)  # type: ignore[assignment]
    handles = []
    if next((p.device.type for p in module.parameters()), "cpu") != "cpu":
        handles.append(module.register_forward_pre_hook(_bring, with_kwargs=True))
    if limit_tokens is not None:
        handles.append(module.register_forward_pre_hook(partial(_refuse_too_long, limit_tokens), with_kwargs=True))
    return handles


def uninstall(module: nn.Module, handles: list[RemovableHandle]) -> None:
    """Take everything off again."""
    for handle in handles:
        handle.remove()
    for name in ("_infuse", "generate"):
        vars(module).pop(name, None)


def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers' `generate` on this model, with our cache where none was asked for.

    Raises ContextLimitError before any kernel runs, where prompt and answer cannot fit `max_out_tokens`.
    """
    args, kwargs = _moved(self, args, kwargs)
    installed: Installed = self._infuse
    settings = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None) or self.generation_config
    prompt = _prompt_tokens(args, kwargs)
    total = _total_tokens(settings, kwargs, prompt)
    if installed.limit_tokens is not None:
        least = prompt + max(installed.min_new_tokens, 1)
        if max(least, total or 0) > installed.limit_tokens:
            raise ContextLimitError(
                f"{prompt} tokens were given and {max(least, total or 0) - prompt} more are asked for, but max_out_tokens={installed.limit_tokens} "
                "caps both together; ask for fewer new tokens, or raise max_out_tokens (None lets the cache grow)"
            )
    if installed.caches and _takes_our_cache(self, settings, kwargs):
        prepared = min(total or prompt, prompt + _PREPARED_TOKENS)
        kwargs["past_key_values"] = KVCache(installed.limit_tokens or prepared, installed.limit_tokens)
    return type(self).generate(self, *args, **kwargs)


def _takes_our_cache(model: Any, settings: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether nothing was said about a cache, and the mode works on one that is handed in."""
    if kwargs.get("past_key_values") is not None or model.config.is_encoder_decoder:
        return False
    if kwargs.get("assistant_model") is not None or kwargs.get("custom_generate") is not None:
        return False
    use_cache = kwargs.get("use_cache", settings.use_cache)
    implementation = kwargs.get("cache_implementation", settings.cache_implementation)
    return use_cache is not False and implementation is None


def _prompt_tokens(args: tuple, kwargs: Mapping[str, Any]) -> int:
    """The length of the prompt in tokens: of embeddings where they are given, else of ids."""
    first = args[0] if args else kwargs.get("inputs")
    for given in (kwargs.get("inputs_embeds"), kwargs.get("input_ids"), first):
        if isinstance(given, Tensor) and given.dim() >= 2:
            return given.shape[1]
    return 1


def _total_tokens(settings: Any, kwargs: Mapping[str, Any], prompt: int) -> int | None:
    """Prompt and answer together, where the call says how long the answer may be."""
    new = kwargs.get("max_new_tokens")
    if new is None and kwargs.get("max_length") is not None:
        return kwargs["max_length"]
    new = settings.max_new_tokens if new is None else new
    return settings.max_length if new is None else prompt + new


def _refuse_too_long(limit_tokens: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: the cap, before any kernel runs."""
    given = kwargs.get("inputs_embeds")
    given = kwargs.get("input_ids", args[0] if args else None) if given is None else given
    if not isinstance(given, Tensor) or given.dim() < 2:
        return
    cache = kwargs.get("past_key_values")
    held = cache.get_seq_length() if hasattr(cache, "get_seq_length") else 0
    if held + given.shape[1] > limit_tokens:
        raise ContextLimitError(f"{held} tokens are in the cache and {given.shape[1]} more were given, but max_out_tokens={limit_tokens} caps them")


def _bring(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook: tensors from elsewhere come to the model's device."""
    return _moved(module, args, kwargs)


def _moved(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    device = next((p.device for p in module.parameters()), torch.device("cpu"))

    def moved(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) and value.device != device else value

    return tuple(moved(arg) for arg in args), {name: moved(value) for name, value in kwargs.items()}
