"""Continuous batching by transformers (`generate_batch`, `init_continuous_batching`) over replaced layers.

transformers schedules, pages the cache and samples. Replaced layers pass queries, keys and values to the attention
function that the config names (layers/attention/named_attention.py). This file checks the preconditions: the cap on
tokens, a single rank, and layers that can read a paged cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from infuse.ground.errors import ContextLimitError, NotAvailable, UnsupportedCall
from infuse.ground.instance_method import InstanceMethod, while_it_has
from infuse.ground.questions import attribute
from infuse.layers.attention.named_attention import calls_by_name
from infuse.layers.mixer import Mixer

NAMES = ("generate_batch", "init_continuous_batching")
_HOOK = "infuse_"  # prefix of our attention functions' names (layers/attention/hook.py)


def install_continuous(module: nn.Module) -> None:
    """Install `generate_batch` and `init_continuous_batching` on `module`, if its class has transformers' own."""
    if hasattr(type(module), "init_continuous_batching"):
        for name, method in zip(NAMES, (generate_batch, init_continuous_batching), strict=True):
            setattr(module, name, InstanceMethod(method, module, name))


@while_it_has("_infuse", "generate_batch")
def generate_batch(self: Any, inputs: Sequence[Sequence[int]], *args: Any, **kwargs: Any) -> Any:
    """Call transformers' `generate_batch`. Raise ContextLimitError before any request starts if one is too long.

    transformers would only log an error from `add_request`.
    """
    config = kwargs.get("generation_config") or (args[0] if args else None) or attribute(self, "generation_config")
    new = kwargs.get("max_new_tokens")
    for ids in inputs:
        _check(self._infuse.limit_tokens, ids, attribute(config, "max_new_tokens") if new is None else new)
    return type(self).generate_batch(self, inputs, *args, **kwargs)


@while_it_has("_infuse", "init_continuous_batching")
def init_continuous_batching(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Make transformers' manager of requests. Its `add_request` raises ContextLimitError beyond `max_out_tokens`.

    Raise NotAvailable on several ranks, and UnsupportedCall if a layer keeps a state or cannot read a paged cache.
    """
    ranks, limit_tokens = self._infuse.group.size, self._infuse.limit_tokens
    if ranks > 1:
        raise NotAvailable(
            f"continuous batching over {ranks} ranks: each would schedule by itself; use generate(), or one rank"
        )
    mixers = [part for part in self.modules() if isinstance(part, Mixer)]
    if stateful := sorted({type(part).__name__ for part in mixers if part.shape.state_values}):
        raise UnsupportedCall(
            "continuous batching: transformers' paged cache holds keys and values alone, and "
            f"{', '.join(stateful)} keeps a state: use generate(), whose batches may be padded"
        )
    if unsupported := sorted({type(part).__name__ for part in mixers if not calls_by_name(part)}):
        raise UnsupportedCall(
            f"continuous batching needs an attention that reads transformers' paged cache; {', '.join(unsupported)} "
            "has one of its own, which does not: use generate(), whose batches may be padded"
        )
    before = self.config._attn_implementation
    if ours := before.startswith(_HOOK):
        self.set_attn_implementation("sdpa")  # same as ours for a dense cache, and supports the paged one
    try:
        manager = type(self).init_continuous_batching(self, *args, **kwargs)
    except BaseException:
        self.set_attn_implementation(before)
        raise
    if ours:
        manager._original_attn_impl = before  # the manager restores it when it stops
    if limit_tokens is not None:
        manager.add_request = InstanceMethod(partial(_add_request, limit_tokens), manager, "add_request")
    return manager


def _add_request(limit_tokens: int, manager: Any, input_ids: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    new = kwargs.get("max_new_tokens", args[1] if len(args) > 1 else None)
    _check(limit_tokens, input_ids, manager.generation_config.max_new_tokens if new is None else new)
    return type(manager).add_request(manager, input_ids, *args, **kwargs)


def _check(limit_tokens: int | None, ids: Sequence[int], new: int | None) -> None:
    if limit_tokens is not None and (new is None or len(ids) + new > limit_tokens):
        asked = "no limit on new tokens" if new is None else f"{new} new ones"
        raise ContextLimitError(
            f"a request has {len(ids)} tokens and {asked}, but max_out_tokens={limit_tokens} caps both together; "
            f"give max_new_tokens of at most {max(limit_tokens - len(ids), 0)}, or raise max_out_tokens"
        )
