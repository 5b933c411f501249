"""Verify by checksum that all ranks got identical inputs and hold the same graphs, before each forward and generate.

The checksums cover inputs, the state of caches and the settings of `generate`, as far as the host knows them without
waiting for a device.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.generation import GenerationConfig, LogitsProcessor, StoppingCriteria

from infuse.cache.kv_cache import KVCache
from infuse.cache.slot import Slot
from infuse.graphs.pool import BucketPool
from infuse.graphs.runner import GraphRunner, modes
from infuse.parallel.group import Group

# Arguments of `generate` that are callables, called at each step.
_CALLED = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
# Attributes of processors, criteria and configs that may differ between ranks.
_OWN = ("initial_timestamp", "transformers_version")


KeptGraphs = GraphRunner | BucketPool


def check_before_forward(group: Group, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: raise RankError if ranks got different inputs."""
    graphs = getattr(vars(module).get("forward"), "graphs", None)
    check_same_inputs(group, "the inputs of forward", args, kwargs, (), graphs)


def check_before_generate(group: Group, kwargs: Mapping[str, Any], settings: tuple, graphs: KeptGraphs | None) -> None:
    """Raise RankError if arguments or `settings` (the model's generation config, the engine's caps) differ by rank."""
    check_same_inputs(group, "the arguments of generate", (), kwargs, settings, graphs)


def check_same_inputs(
    group: Group, what: str, args: tuple, kwargs: Mapping[str, Any], settings: tuple, graphs: KeptGraphs | None
) -> None:
    """Compare `what` in one exchange. Keep as many graphs as the rank with the least room; none if graphs differ."""
    values = (*args, *kwargs.values(), *settings)
    called = [kwargs[name] for name in _CALLED if name in kwargs]
    inputs = {name: value for name, value in kwargs.items() if name not in _CALLED}
    checksums = {
        what: _checksum((args, inputs, repr(modes()))),
        "the caches (tokens, rows, crops)": _checksum([_cache_state(v) for v in values if isinstance(v, Cache)]),
        "the generation configs": _checksum([vars(value) for value in values if isinstance(value, GenerationConfig)]),
        "the caps on tokens": _checksum([value for value in settings if not isinstance(value, GenerationConfig)]),
        "the logits processors and stopping criteria": _checksum([_called_state(value) for value in called]),
    }
    mine = (0, 0) if graphs is None else (_checksum(repr(graphs.standing())), graphs.fitting())
    standing, fitting = zip(*group.check_same(checksums, what, mine), strict=True)
    if graphs is not None and len(set(standing)) > 1:
        graphs.clear()
    elif graphs is not None:
        graphs.keep(min(fitting))


def _cache_state(cache: Any) -> list:
    """Return the number of tokens and rows in each layer. Keys and values are left out: they differ between ranks."""
    if isinstance(cache, EncoderDecoderCache):
        self_state, cross_state = _cache_state(cache.self_attention_cache), _cache_state(cache.cross_attention_cache)
        return [*self_state, *cross_state, list(cache.is_updated.values())]
    layers = cache.slots if isinstance(cache, KVCache) else cache.layers
    return [_slot_state(layer) for layer in layers]


def _slot_state(layer: Any) -> tuple:
    if isinstance(layer, Slot):
        return layer.length, layer.rows, _on_host(layer.row_lengths)
    keys = getattr(layer, "keys", None)  # not every cache layer of transformers has keys or cumulative_length
    shape = (keys.shape[0], keys.shape[-2]) if isinstance(keys, Tensor) and keys.dim() > 1 else ()
    return type(layer).__name__, shape, _on_host(getattr(layer, "cumulative_length", None))


def _on_host(value: Any) -> Any:
    """Return numbers and the values of CPU tensors; None for other tensors, for which the host would have to wait."""
    if isinstance(value, Tensor):
        return value.tolist() if value.device.type == "cpu" else None
    return value


def _called_state(value: Any) -> Any:
    """Describe processors and criteria by their classes and attributes, and functions by their names."""
    if isinstance(value, (list, tuple)):
        return [_called_state(inner) for inner in value]
    state = getattr(value, "__dict__", {})
    attributes = {name: state[name] for name in sorted(state) if name not in _OWN}
    return type(value), getattr(value, "__qualname__", ""), attributes


def _checksum(value: Any, seed: int = 0) -> int:
    """Checksum of nested values: CPU tensors by value, others by shape and dtype, unknown objects by class alone."""
    if isinstance(value, Tensor):
        seed = zlib.crc32(f"{value.dtype} {tuple(value.shape)}".encode(), seed)
        if value.device.type != "cpu":
            return seed
        return zlib.crc32(value.detach().contiguous().view(-1).view(torch.uint8).numpy().data, seed)
    if isinstance(value, Mapping):
        # Sorted: transformers makes masks for the set of the layers' kinds, whose order differs between processes.
        for key in sorted(value, key=str):
            if key not in _OWN and not str(key).startswith("_"):
                seed = _checksum(value[key], zlib.crc32(str(key).encode(), seed))
        return seed
    if isinstance(value, (tuple, list)):
        for inner in value:
            seed = _checksum(inner, seed)
        return zlib.crc32(str(len(value)).encode(), seed)
    if isinstance(value, (set, frozenset)):
        return _checksum(sorted(map(repr, value)), seed)
    if isinstance(value, (LogitsProcessor, StoppingCriteria)):
        return _checksum(_called_state(value), seed)
    if isinstance(value, type):
        return zlib.crc32(value.__qualname__.encode(), seed)
    plain = isinstance(value, (bool, int, float, str, bytes, type(None), torch.dtype))
    return zlib.crc32(repr(value if plain else type(value)).encode(), seed)
