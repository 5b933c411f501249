"""The buckets of a model: which one a call of `generate` gets, and which are kept for the next call, so that a graph is
captured once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from itertools import accumulate

from infuse.graphs.bucket import Bucket
from infuse.graphs.capture import Backend
from infuse.parallel.group import LOCAL, Group

_SMALLEST_TOKENS = 64


class Buckets:
    """The buckets of one model: those at work and, up to `limit_bytes`, those kept for the next call, the latest used
    last.

    `state` is what steps depend on beside their arguments: nothing is kept of another one. The ranks of a `group` agree
    on what they keep when the next call begins.
    """

    def __init__(
        self,
        backend: Backend,
        limit_bytes: int,
        limit_tokens: int | None = None,
        state: Callable[[], Hashable] | None = None,
        group: Group = LOCAL,
    ):
        self.backend, self.limit_bytes, self.limit_tokens, self.group = backend, limit_bytes, limit_tokens, group
        self._state_of = state or (lambda: None)
        self._state: Hashable = None
        self.refused: set[Hashable] = set()  # keys of steps that cannot be captured
        self.warned = False
        self._idle: list[Bucket] = []
        self._lock = threading.Lock()

    def capacity(self, tokens: int) -> int:
        """The capacity of the bucket for so many tokens: few different ones, each twice the last."""
        if self.limit_tokens is not None:
            return self.limit_tokens
        return max(_SMALLEST_TOKENS, 1 << (tokens - 1).bit_length())

    def take(self, batch: int, tokens: int) -> Bucket:
        """A bucket with room for `tokens`, its cache empty: one that is kept, else a new one."""
        capacity = self.capacity(tokens)
        with self._lock:
            found = next((b for b in reversed(self._idle) if (b.batch, b.capacity_tokens) == (batch, capacity)), None)
            if found is not None:
                self._idle.remove(found)
        if found is None:
            return Bucket(capacity, self.limit_tokens)
        found.cache.reset()
        found.place = 0
        return found

    def give_back(self, bucket: Bucket) -> None:
        """Keep it for the next call; the least recently used go beyond the bound."""
        if not bucket.batch:  # no step was made
            return
        bucket.release()
        with self._lock:
            self._idle.append(bucket)
        if self.group.size == 1:
            self.keep(self.fitting())

    def look(self) -> Hashable:
        """The state that steps depend on, now."""
        state = self._state_of()
        if state != self._state:
            self.restart()
            self._state = state
        return state

    def standing(self) -> tuple:
        """What the next call depends on beside its arguments, as far as it can be the same on several ranks."""
        self.look()
        with self._lock:
            return [(bucket.batch, bucket.capacity_tokens, bucket.standing()) for bucket in self._idle], len(
                self.refused
            )

    def fitting(self) -> int:
        """How many of the latest buckets there is room for."""
        with self._lock:
            held = list(accumulate(bucket.nbytes() for bucket in reversed(self._idle)))
        return sum(total <= self.limit_bytes for total in held)

    def keep(self, latest: int) -> None:
        """Give the memory of all but the `latest` back."""
        with self._lock:
            del self._idle[: max(len(self._idle) - latest, 0)]

    def restart(self) -> None:
        """Forget everything."""
        self.clear()
        self.refused.clear()

    def grown(self, bucket: Bucket) -> Bucket:
        """A bucket of twice the capacity with the same cache; `bucket` is given back."""
        old = bucket.cache.storages()
        larger = self.take(bucket.batch, 2 * bucket.capacity_tokens)
        for source, slot in zip(bucket.cache.layers, range(len(bucket.cache.layers)), strict=True):
            assert source.key_storage is not None and source.value_storage is not None
            _, kv_heads, _, width = source.key_storage.shape
            target = larger.cache.slot(slot)
            target.reserve(bucket.batch, bucket.place, kv_heads, width, source.key_storage)
            target.length = bucket.place
        for source_storage, storage in zip(old, larger.cache.storages(), strict=True):
            storage[:, :, : bucket.place] = source_storage[:, :, : bucket.place]
        self.give_back(bucket)
        return larger

    def __reduce__(self) -> tuple:  # a copy has none of its own yet
        return type(self), (self.backend, self.limit_bytes, self.limit_tokens, self._state_of, self.group)

    def clear(self) -> None:
        """Give the memory of all idle buckets back."""
        with self._lock:
            self._idle.clear()
