"""Bucket: a KV cache of one batch size and capacity, and the CUDA graphs of decode steps that update it in place.

It neither loops nor samples.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from infuse.cache_names import CACHE_NAMES, FORMER
from infuse.graphs.capture import Backend
from infuse.graphs.runner import FirstError, GraphRunner
from infuse.graphs.signature import Unsupported
from infuse.layers.cache import KVCache


class Bucket:
    """`weights` returns state that graphs depend on besides the cache's addresses; `warn` gets capture errors."""

    def __init__(
        self,
        backend: Backend,
        capacity_tokens: int,
        limit_tokens: int | None = None,
        format: str | None = None,
        *,
        weights: Callable[[], Hashable] | None = None,
        warn: FirstError | None = None,
    ):
        self.cache = KVCache(capacity_tokens, limit_tokens, format)
        self.limit_tokens = limit_tokens
        self._step = _Step(self.cache, weights)
        self.graphs = GraphRunner(self._step, backend, state=self._step.state, warn=warn)
        self._asked_tokens = capacity_tokens
        self._zero_from = -1  # the storages hold zeros from this token on; -1: unknown

    @property
    def batch(self) -> int:
        """Rows of the cache; 0 before the first call."""
        storage = self._storage()
        return 0 if storage is None else storage.shape[0]

    @property
    def capacity_tokens(self) -> int:
        """Number of tokens that the cache has room for."""
        storage = self._storage()
        return self._asked_tokens if storage is None else storage.shape[2]

    def nbytes(self) -> int:
        """Device memory of the cache and the graphs in bytes."""
        return self.cache.nbytes() + self.graphs.nbytes()

    def reset(self) -> None:
        """Empty the cache for another call of `generate`, and keep the graphs."""
        self.cache.reset()
        self._zero_from = -1

    def bind(self, tokens: int) -> None:
        """Prepare the next step after `tokens`: zero the room beyond them and record the storages' addresses.

        Graphs are dropped if the addresses have changed.
        """
        storages = self.cache.storages()
        addresses = tuple(storage.data_ptr() for storage in storages)
        if tokens != self._zero_from or addresses != self._step.addresses:
            for storage in storages:  # attention multiplies masked values by zero, so they must not be NaN or infinite
                storage[:, :, tokens:] = 0
        self._step.addresses = addresses
        self._zero_from = tokens + 1  # the step writes one token, with or without a graph

    def replay(self, forward: Callable[..., Any], tokens: int, inputs: Mapping[str, Any], cache_name: str) -> Any:
        """Replay one step of `forward` after `tokens` and return its output; None if there is no graph (yet).

        A mask in `inputs` must cover the whole capacity. A replay adds the step's token to the cache's length.
        """
        self.bind(tokens)
        self._step.forward, self._step.cache_name = forward, cache_name
        places = torch.arange(tokens, tokens + 2, device=self.cache.storages()[0].device)
        output = self.graphs.replay((places,), inputs)
        if output is not None:
            for slot in self.cache.layers:
                slot.length = tokens + 1
        return output

    @property
    def result_name(self) -> str:
        """Key under which the forward returns the cache."""
        return self._step.result_name

    def _storage(self) -> Tensor | None:
        return next(iter(self.cache.storages()), None)


class _Step:
    """The captured decode step: a forward over one cache. Not a method of Bucket: a cycle would delay freeing it."""

    def __init__(self, cache: KVCache, weights: Callable[[], Hashable] | None):
        self.cache = cache
        self.forward: Callable[..., Any] | None = None
        self.cache_name = self.result_name = FORMER  # of the argument, and in what the forward returns
        self.addresses: tuple[int, ...] = ()  # of the cache's storages
        self._weights = weights

    def state(self) -> Hashable:
        """State that graphs depend on besides their arguments."""
        return None if self._weights is None else self._weights(), self.addresses

    def __call__(self, places: Tensor, **inputs: Any) -> Any:
        """Return the logits; `places` holds the index at which the token is written, and the tokens including it."""
        assert self.forward is not None
        self.cache.hold_place(places[0], places[1])
        try:
            output: Any = self.forward(**{self.cache_name: self.cache}, **inputs)
        finally:
            self.cache.hold_place(None)
        caches = [name for name in output if name in CACHE_NAMES] if isinstance(output, Mapping) else []
        # Others, such as hidden states, would cover empty room.
        if len(caches) != 1 or set(output) != {"logits", *caches} or output[caches[0]] is not self.cache:
            raise Unsupported(f"a step that returns {type(output).__name__}")
        self.result_name = caches[0]
        kind: Any = type(output)
        return kind(logits=output["logits"])
