"""GraphedCache: a KV cache that lets any loop that calls the model replay graphs of decode steps.

The loop may be our own, transformers' (beam search) or the caller's. In a model with an encoder it is the first half of
a pair, and the second holds the encoder's states.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from infuse.cache.kv_cache import KVCache, pair_of
from infuse.cache.slot import Slot
from infuse.graphs.bucket import Bucket
from infuse.graphs.held_states import ENCODED, MASK, GivenStates
from infuse.graphs.pool import BucketPool
from infuse.ground import interrupts
from infuse.ground.cache_names import CACHE_NAMES, cache_in


class GraphedCache(KVCache):
    """Holds tokens in a bucket from `pool` until `end`, and in plain copies afterwards."""

    @interrupts.held_back()
    def __init__(self, pool: BucketPool, batch: int, tokens: int):
        self._pool = pool
        self._takes_mask: bool | None = None
        self._states: tuple[Bucket, GivenStates, Hashable] | None = None  # an encoder's, and where they are held
        self.bucket: Bucket | None = pool.take(batch, tokens)
        with pool.backend.turn():  # wait for earlier uses of the bucket on other streams
            super().__init__(self.bucket.capacity_tokens, self.bucket.limit_tokens, pool.format)
        self._share(self.bucket)

    def _share(self, bucket: Bucket) -> Bucket:
        self.bucket, self.layers, self.more = bucket, bucket.cache.layers, bucket.cache.more
        return bucket

    @interrupts.held_back()
    def end(self, keep: bool) -> None:
        """Return the bucket to the pool. `keep`: the cache keeps a copy of its tokens, else nothing."""
        if self.bucket is None:
            return
        with self._pool.backend.turn():  # else another stream may overwrite the tokens while they are copied
            bucket, self.bucket, self._states = self.bucket, None, None
            self.layers, self.more = self.copied_slots() if keep else ([], {})
            self._pool.give_back(bucket)

    @interrupts.held_back()  # else the old bucket could be returned twice
    def _grow(self, bucket: Bucket) -> Bucket:
        return self._share(self._pool.grown(bucket))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row b by row beam_idx[b]. With a bucket this is done in place, because graphs hold addresses."""
        for slot in self._apart:
            (slot.reorder_cache if self.bucket is None else slot.reorder_in_place)(beam_idx)

    def __reduce__(self) -> Any:  # a copy holds the tokens without the bucket
        return _plain, (self._settings, *self.copied_slots())

    # -- decode steps

    def replay(self, forward: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Replay the graph of a decode step with these arguments; None if the caller has to call `forward` itself."""
        bucket, cache = self.bucket, cache_in(kwargs)
        pair = pair_of(cache)
        of_tokens = _Names("" if pair is None else "decoder_")
        if bucket is None or args or torch.is_grad_enabled() or not self.can_use_cuda_graph(kwargs, of_tokens):
            return None
        given = None if pair is None else GivenStates.of(pair.cross_attention_cache, kwargs)
        if pair is not None and given is None:
            return None
        with self._pool.backend.turn():
            tokens = self.held_slots[0].length
            if tokens == bucket.capacity_tokens:
                bucket = self._grow(bucket)
            inputs = self._padded(forward, kwargs, of_tokens, tokens, bucket.capacity_tokens)
            name = next(name for name in CACHE_NAMES if kwargs.get(name) is not None)
            output = bucket.replay(forward, tokens, inputs, name, self._held(bucket, given))
        if output is not None:
            bucket.complete(output, cache, given)
        return output

    def _held(self, bucket: Bucket, given: GivenStates | None) -> Hashable:
        """Where the bucket holds the states that are given, once for all steps until others are."""
        if given is None:
            return None
        if self._states is None or self._states[0] is not bucket or not given.are(self._states[1]):
            self._states = bucket, given, bucket.hold(given)
        return self._states[2]

    def can_use_cuda_graph(self, kwargs: Mapping[str, Any], of_tokens: _Names) -> bool:
        """Whether a call is a decode step: one token for each row of the cache, at the same index in all rows."""
        ids, mask, positions = (kwargs.get(name) for name in (of_tokens.ids, of_tokens.mask, of_tokens.positions))
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] != 1 or ids.dtype != torch.long:
            return False
        if not self.even(ids.shape[0]) or self.storages()[0].device != ids.device:
            return False
        first = self.held_slots[0]
        cached_tokens, limit_tokens = first.length, first.limit_tokens
        if limit_tokens is not None and cached_tokens >= limit_tokens:  # the eager call raises the error
            return False
        if positions is not None and (not isinstance(positions, Tensor) or positions.shape[-1] != 1):
            return False
        return mask is None or (isinstance(mask, Tensor) and tuple(mask.shape) == (ids.shape[0], cached_tokens + 1))

    def _padded(
        self,
        forward: Callable[..., Any],
        kwargs: Mapping[str, Any],
        of_tokens: _Names,
        tokens: int,
        capacity_tokens: int,
    ) -> dict[str, Any]:
        """Return a step's arguments in one signature for all steps: no cache, the mask padded to the capacity.

        Of a pair's also without the encoder's states and their mask.
        """
        left = {*CACHE_NAMES, of_tokens.mask, *((ENCODED, MASK) if of_tokens.prefix else ())}
        inputs = {name: kwargs[name] for name in sorted(kwargs) if name not in left}
        mask, ids = kwargs.get(of_tokens.mask), kwargs[of_tokens.ids]
        if self._takes_mask is None:
            self._takes_mask = of_tokens.mask in inspect.signature(forward).parameters
        if mask is None and self._takes_mask and self.token_storages():  # without one, some models make it on the host
            mask = ids.new_ones(ids.shape[0], tokens + 1)
        if mask is not None:
            inputs[of_tokens.mask] = F.pad(mask, (0, capacity_tokens - tokens - 1))
        return inputs


class _Names:
    """What a model calls its arguments of tokens."""

    def __init__(self, prefix: str):
        self.prefix = prefix
        self.ids, self.mask, self.positions = prefix + "input_ids", prefix + "attention_mask", prefix + "position_ids"


def _plain(
    settings: tuple[int, int | None, str | None], layers: list[Slot], more: dict[tuple[int, str], Slot]
) -> KVCache:
    cache = KVCache(*settings)
    cache.layers, cache.more = layers, more
    return cache
