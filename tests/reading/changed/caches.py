"""Layers that differ in what they cache, or only where there is a cache. See tests/reading/layers.py for the legend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.reading.cases import EITHER, LEFT, WORDS, Case
from tests.reading.layers import Attention, Layer


class UnrotatedCached(Attention):
    """The cache gets keys without their rotation; new keys are rotated, those from the cache never."""

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Any]:
        q, rotated = self.rotate(q, k, *given["position_embeddings"])
        k, v = self.append(k, v, given["cache"])
        k = torch.cat((k[:, :, : k.shape[2] - rotated.shape[2]], rotated), dim=2)
        attended, weights = self.attend(q, k, v, given["attention_mask"])
        return self.output(attended), weights


class CachedBeforeRotation(Attention):
    """The cache gets keys without their rotation, and all keys are used as they come from it."""

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Any]:
        q, rotated = self.rotate(q, k, *given["position_embeddings"])
        if given["cache"] is not None:
            rotated, v = given["cache"].update(k, v, self.layer_idx)
        attended, weights = self.attend(q, rotated, v, given["attention_mask"])
        return self.output(attended), weights


class SwappedOnCache(Attention):
    """The cache has keys where values belong, and gives them back."""

    def append(self, k: Tensor, v: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        if cache is not None:
            v, k = cache.update(v, k, self.layer_idx)
        return k, v


class CachedMore(Attention):
    """Leaves something for later in another layer of the cache."""

    def append(self, k: Tensor, v: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        if cache is not None:
            cache.update(k, v, self.layer_idx + 2)
        return super().append(k, v, cache)


class KeysScaledBefore(Attention):
    def append(self, k: Tensor, v: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        return super().append(k * 1.01, v, cache)


class KeysScaledAfter(Attention):
    def append(self, k: Tensor, v: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        k, v = super().append(k, v, cache)
        return k * 1.01, v


class ValuesScaledBefore(Attention):
    def append(self, k: Tensor, v: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        return super().append(k, v * 1.01, cache)


class ValuesScaledOnTheWay(Attention):
    """What attention gets is scaled, what the cache keeps is not."""

    def append(self, k: Tensor, v: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        k, kept = super().append(k, v, cache)
        return k, kept if cache is None else kept * 1.01


class CachedKeysLighter(Attention):
    """Keys of earlier calls are scaled, which no call without a cache shows."""

    def append(self, k: Tensor, v: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        new = k.shape[2]
        k, v = super().append(k, v, cache)
        past = torch.arange(k.shape[2], device=k.device) < k.shape[2] - new
        return torch.where(past[:, None], k * 0.9, k), v


class NeverCached(Attention):
    def append(self, k: Tensor, v: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        return k, v


class CachedElsewhere(Attention):
    """Each layer uses the other one's place in the cache."""

    def append(self, k: Tensor, v: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        if cache is not None:
            k, v = cache.update(k, v, 1 - self.layer_idx)
        return k, v


class OtherwiseOnCache(Layer):
    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        x = x + self.attended(x, given)
        return x + self.transformed(x) * (1.01 if given["cache"] is not None else 1.0)


class OtherwiseOnLongCache(Layer):
    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        cache = given["cache"]
        long = cache is not None and cache.get_seq_length(self.layer_idx) >= 8
        x = x + self.attended(x, given)
        return x + self.transformed(x) * (1.01 if long else 1.0)


class OtherwiseIfCaching(Layer):
    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        x = x + self.attended(x, given)
        return x + self.transformed(x) * (1.01 if given["use_cache"] else 1.0)


CASES = (
    Case("cached without rotation, new keys rotated", LEFT, attention=UnrotatedCached, words=("cache",)),
    Case("cached before the rotation", LEFT, attention=CachedBeforeRotation, words=("cache",)),
    Case("keys scaled before the cache", LEFT, attention=KeysScaledBefore),
    Case("never cached", LEFT, attention=NeverCached, words=("cache",)),
    Case("cached elsewhere", EITHER, attention=CachedElsewhere, words=("cache",)),
    Case("swapped on the cache", LEFT, attention=SwappedOnCache, words=("cache",), like=None),
    Case("cached more", LEFT, attention=CachedMore, words=("cache",), like=None),
    Case("otherwise on a cache", LEFT, layer=OtherwiseOnCache, words=("cache",)),
    Case("otherwise on a long cache", LEFT, layer=OtherwiseOnLongCache, words=("cache", *WORDS["branch"])),
)
VARIANTS = (
    Case("keys scaled after the cache", EITHER, attention=KeysScaledAfter),
    Case("values scaled before the cache", LEFT, attention=ValuesScaledBefore),
    Case("values scaled after the cache", LEFT, attention=ValuesScaledOnTheWay, words=("cache",)),
    Case("cached keys lighter", LEFT, attention=CachedKeysLighter),
    Case("otherwise if caching", LEFT, layer=OtherwiseIfCaching, words=("use_cache", "branch")),
)
