"""Bucket: a KV cache for one batch size and one capacity, with the CUDA graphs of decode steps that read and write it in
place. No loop, no sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from infuse.graphs.capture import Backend
from infuse.graphs.runner import FirstError, GraphRunner
from infuse.graphs.signature import Unsupported
from infuse.layers.cache import KVCache


class Bucket:
    """`weights` is what graphs depend on beside the cache's addresses; `warn` is told why a step cannot be captured."""

    def __init__(
        self,
        backend: Backend,
        capacity_tokens: int,
        limit_tokens: int | None = None,
        *,
        weights: Callable[[], Hashable] | None = None,
        warn: FirstError | None = None,
    ):
        self.cache = KVCache(capacity_tokens, limit_tokens)
        self.limit_tokens = limit_tokens
        self._step = _Step(self.cache, weights)
        self.graphs = GraphRunner(self._step, backend, state=self._step.state, warn=warn)
        self._asked_tokens = capacity_tokens
        self._zero_from = -1  # from this token on the storages are known to hold zeros

    @property
    def batch(self) -> int:
        """Rows of the cache; 0 before the first call."""
        storage = self._storage()
        return 0 if storage is None else storage.shape[0]

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the cache has room for."""
        storage = self._storage()
        return self._asked_tokens if storage is None else storage.shape[2]

    def nbytes(self) -> int:
        """Device memory of the cache and of the graphs."""
        return self.cache.nbytes() + self.graphs.nbytes()

    def reset(self) -> None:
        """Empty the cache for another call of `generate`; graphs are kept."""
        self.cache.reset()
        self._zero_from = -1

    def bind(self, tokens: int) -> None:
        """Take the cache as it lies, with `tokens` in it, for the next step: clear the room beyond them, and note the
        addresses, without which no graph is replayed.
        """
        storages = self.cache.storages()
        addresses = tuple(storage.data_ptr() for storage in storages)
        if tokens != self._zero_from or addresses != self._step.addresses:
            for storage in storages:  # attention multiplies what a mask hides by zero, which NaN and infinity survive
                storage[:, :, tokens:] = 0
        self._step.addresses = addresses
        self._zero_from = tokens + 1  # the step writes one token, by a graph or without

    def replay(self, forward: Callable[..., Any], tokens: int, inputs: Mapping[str, Any]) -> Any:
        """What `forward` returns for one step after `tokens`, by a graph; None where there is none, or not yet.

        A mask in `inputs` covers the whole capacity. After a replay the cache has counted the step's token.
        """
        self.bind(tokens)
        self._step.forward = forward
        places = torch.arange(tokens, tokens + 2, device=self.cache.storages()[0].device)
        output = self.graphs.replay((places,), inputs)
        if output is not None:
            for slot in self.cache.layers:
                slot.length = tokens + 1
        return output

    def _storage(self) -> Tensor | None:
        return self.cache.layers[0].key_storage if self.cache.layers else None


class _Step:
    """The decode step that is captured: a model's forward over one cache. It does not know its bucket, whose memory
    would otherwise wait for Python's garbage collector.
    """

    def __init__(self, cache: KVCache, weights: Callable[[], Hashable] | None):
        self.cache = cache
        self.forward: Callable[..., Any] | None = None
        self.addresses: tuple[int, ...] = ()  # of the cache's storages
        self._weights = weights

    def state(self) -> Hashable:
        """What graphs depend on beside their arguments."""
        return None if self._weights is None else self._weights(), self.addresses

    def __call__(self, places: Tensor, **inputs: Any) -> Any:
        """The model's output without the cache. No number of the host that changes from step to step may be used here.

        `places` are where the token goes, and how many there are with it. Raises Unsupported where the model returns more
        than logits: hidden states, attention over empty room.
        """
        assert self.forward is not None
        self.cache.hold_place(places[0], places[1])
        try:
            output: Any = self.forward(past_key_values=self.cache, **inputs)
        finally:
            self.cache.hold_place(None)
        names = {"logits", "past_key_values"}
        if not isinstance(output, Mapping) or set(output) != names or output["past_key_values"] is not self.cache:
            raise Unsupported(f"a step that returns {type(output).__name__}")
        kind: Any = type(output)
        return kind(logits=output["logits"])
