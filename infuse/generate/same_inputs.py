"""Verify by checksum, before each forward and each generate, that all ranks got the same and hold the same graphs.

Compared are inputs, the state of caches, and what `generate` goes by; only what the host knows, so that nothing waits
for a device.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.generation import GenerationConfig, LogitsProcessor, StoppingCriteria

from infuse.errors import RankError
from infuse.graphs.graph import modes
from infuse.layers.cache import KVSlot
from infuse.parallel.group import Group

_CALLED = (
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
)  # of generate: whatever is called at each step
_OWN = ("initial_timestamp", "transformers_version")  # of processors, criteria and configs: each rank has its own


class Kept(Protocol):
    """Graphs that are kept from call to call."""

    def standing(self) -> Any:
        """What the next call depends on, beside its arguments: in words, the same on ranks that will do the same."""

    def fitting(self) -> int:
        """How many of the latest there is room for."""

    def keep(self, latest: int) -> None:
        """Only so many of the latest from now on."""

    def restart(self) -> None:
        """Forget everything."""


def agree_before(group: Group, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: all ranks are given the same."""
    agreed(group, "forward", "inputs", args, kwargs, kept=getattr(vars(module).get("forward"), "graphs", None))


def agree_to_generate(group: Group, args: tuple, kwargs: Mapping[str, Any], settings: tuple, kept: Kept | None) -> None:
    """`settings` is what `generate` goes by beside its arguments: the model's generation config, the engine's caps."""
    agreed(group, "generate", "arguments", args, kwargs, settings=settings, kept=kept)


def agreed(
    group: Group,
    what: str,
    given: str,
    args: tuple,
    kwargs: Mapping[str, Any],
    *,
    settings: tuple = (),
    kept: Kept | None = None,
) -> None:
    """RankError that says what differs from rank 0's, and on which ranks: by checksums, all in one exchange.

    Of what is `kept` all ranks keep what the one with the least room can; nothing where they have other things.
    """
    caches = [value for value in (*args, *kwargs.values()) if isinstance(value, Cache)]
    called = [kwargs[name] for name in _CALLED if name in kwargs]
    rest = {name: value for name, value in kwargs.items() if name not in _CALLED}
    configs = [value for value in (*args, *kwargs.values(), *settings) if isinstance(value, GenerationConfig)]
    sums = {
        f"the {given} of {what}": _checksum((args, rest, repr(modes()))),
        "the caches (tokens, rows, crops)": _checksum([_cache_state(cache) for cache in caches]),
        "the generation configs": _checksum([vars(config) for config in configs]),
        "the caps on tokens": _checksum([value for value in settings if not isinstance(value, GenerationConfig)]),
        "the logits processors and stopping criteria": _checksum([_called_state(value) for value in called]),
    }
    standing, fitting = (0, 0) if kept is None else (_checksum(repr(kept.standing())), kept.fitting())
    *found, standings, fits = zip(
        *group.numbers([*sums.values(), standing, fitting], f"the {given} of {what}"), strict=True
    )
    for name, theirs in zip(sums, found, strict=True):
        if others := [str(rank) for rank in range(group.size) if theirs[rank] != theirs[0]]:
            where = f"rank {group.rank} of {group.size}"
            raise RankError(
                f"{where}: {name} on rank {', '.join(others)} differ from rank 0's; give all ranks the same"
            )
    if kept is not None and len(set(standings)) > 1:
        kept.restart()
    elif kept is not None:
        kept.keep(min(fits))


def _cache_state(cache: Any) -> list:
    """What a cache holds, in numbers: tokens and rows of each layer. Keys and values are each rank's own."""
    if isinstance(cache, EncoderDecoderCache):
        return [
            *_cache_state(cache.self_attention_cache),
            *_cache_state(cache.cross_attention_cache),
            list(cache.is_updated.values()),
        ]
    return [_slot_state(layer) for layer in cache.layers]


def _slot_state(layer: Any) -> tuple:
    if isinstance(layer, KVSlot):
        rows = 0 if layer.key_storage is None or not layer.length else layer.key_storage.shape[0]
        return layer.length, rows, _on_host(layer.row_lengths)
    keys, seen = (
        getattr(layer, "keys", None),
        getattr(layer, "cumulative_length", None),
    )  # not all of transformers' layers have them
    shape = (keys.shape[0], keys.shape[-2]) if isinstance(keys, Tensor) and keys.dim() > 1 else ()
    return type(layer).__name__, shape, _on_host(seen)


def _on_host(value: Any) -> Any:
    """A number or its tensor; None for a tensor on a device, which would have to be waited for."""
    if isinstance(value, Tensor):
        return value.tolist() if value.device.type == "cpu" else None
    return value


def _called_state(value: Any) -> Any:
    """Processors and criteria by their classes and values, functions by their names."""
    if isinstance(value, (list, tuple)):
        return [_called_state(one) for one in value]
    own = getattr(value, "__dict__", {})
    return (
        type(value),
        getattr(value, "__qualname__", ""),
        {name: own[name] for name in sorted(own) if name not in _OWN},
    )


def _checksum(value: Any, seed: int = 0) -> int:
    """Of tensors on the CPU their values, of others their shape; of processors and criteria their values; of what else
    is no plain value its class.
    """
    if isinstance(value, Tensor):
        seed = zlib.crc32(f"{value.dtype} {tuple(value.shape)}".encode(), seed)
        if value.device.type != "cpu":
            return seed
        return zlib.crc32(value.detach().contiguous().view(-1).view(torch.uint8).numpy().data, seed)
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in _OWN and not str(key).startswith("_"):
                seed = _checksum(inner, zlib.crc32(str(key).encode(), seed))
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
