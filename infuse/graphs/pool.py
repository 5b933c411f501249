"""BucketPool: buckets that are kept between calls of `generate`, so that a graph is captured only once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from itertools import accumulate

from infuse.graphs.bucket import Bucket
from infuse.graphs.capture import Backend
from infuse.graphs.runner import FirstError
from infuse.parallel.group import LOCAL, Group

_SMALLEST_TOKENS = 64
PREPARED_TOKENS = 512  # initial room in a cache for new tokens; it doubles for longer answers


class BucketPool:
    """The idle buckets of one model, up to `limit_bytes`, the most recently used last.

    `weights` returns what graphs depend on besides their arguments. The ranks of a `group` agree on which buckets they
    keep when the next call begins. `format` is that of the caches.
    """

    def __init__(
        self,
        backend: Backend,
        limit_bytes: int,
        limit_tokens: int | None = None,
        weights: Callable[[], Hashable] | None = None,
        group: Group = LOCAL,
        format: str | None = None,
    ):
        self.format = format
        self.backend, self.limit_bytes, self.limit_tokens, self.group = backend, limit_bytes, limit_tokens, group
        self.idle: list[Bucket] = []
        self._weights = weights
        self._warn = FirstError("no CUDA graph of the decode step, so it runs without")
        self._lock = threading.Lock()

    def capacity(self, tokens: int) -> int:
        """Return the capacity of the bucket for `tokens`: the limit, or a power of two, so that there are few sizes."""
        if self.limit_tokens is not None:
            return self.limit_tokens
        return max(_SMALLEST_TOKENS, 1 << (tokens - 1).bit_length())

    def take(self, batch: int, tokens: int) -> Bucket:
        """Return an empty bucket with room for `tokens`, an idle one if possible."""
        wanted = batch, self.capacity(tokens)
        with self._lock:
            bucket = next((b for b in reversed(self.idle) if (b.batch, b.capacity_tokens) == wanted), None)
            if bucket is not None:
                self.idle.remove(bucket)
        if bucket is None:
            return Bucket(
                self.backend, wanted[1], self.limit_tokens, self.format, weights=self._weights, warn=self._warn
            )
        return bucket

    def give_back(self, bucket: Bucket) -> None:
        """Keep the bucket for the next call. On one rank, drop the least recently used ones beyond `limit_bytes`."""
        if not bucket.batch:  # never used
            return
        bucket.reset()
        with self._lock:
            self.idle.append(bucket)
        if self.group.size == 1:
            self.keep(self.fitting())

    def grown(self, bucket: Bucket) -> Bucket:
        """Return a bucket of twice the capacity with the same tokens, and take `bucket` back."""
        larger = self.take(bucket.batch, 2 * bucket.capacity_tokens)
        for index, source in enumerate(bucket.cache.layers):
            slot = larger.cache.slot(index, type(source))
            if source.is_initialized:
                slot.take(source)
        for place, source in bucket.cache.more.items():
            larger.cache.slot_of(*place, type(source)).take(source)
        self.give_back(bucket)
        return larger

    def standing(self) -> list[tuple]:
        """State that the next call depends on besides its arguments, as far as ranks can compare it."""
        with self._lock:
            idle = list(self.idle)
        return [(bucket.batch, bucket.capacity_tokens, bucket.graphs.standing()) for bucket in idle]

    def fitting(self) -> int:
        """Number of the most recent buckets that fit into `limit_bytes`."""
        with self._lock:
            totals = list(accumulate(bucket.nbytes() for bucket in reversed(self.idle)))
        return sum(total <= self.limit_bytes for total in totals)

    def keep(self, latest: int) -> None:
        """Free all buckets but the `latest` most recent."""
        with self._lock:
            del self.idle[: max(len(self.idle) - latest, 0)]

    def clear(self) -> None:
        """Free all idle buckets."""
        with self._lock:
            self.idle.clear()

    def __reduce__(self) -> tuple:  # a copy starts without buckets
        return type(self), (self.backend, self.limit_bytes, self.limit_tokens, self._weights, self.group, self.format)
