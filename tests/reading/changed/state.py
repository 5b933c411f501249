"""Layers that keep count where it is hard to see, that know their index, and that ask what a trace cannot tell."""

from __future__ import annotations

import copy
import itertools
from collections import Counter, deque
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.reading.cases import EITHER, LEFT, WORDS, Case
from tests.reading.layers import Attention, Config, Layer, Pieces, eager_attention_forward

COUNT = itertools.count()

# ---- state ----


class Keeps(Layer):
    """Calls after the first ten thousand differ."""

    def __init__(self, config: Config, layer_idx: int, pieces: Pieces):
        super().__init__(config, layer_idx, pieces)
        self.kept = self.made()

    def made(self) -> Any:
        return itertools.count()

    def calls(self) -> int:
        return next(self.kept)

    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        y = super().both(x, given)
        return y * 1.5 if self.calls() > 10_000 else y


class InCounter(Keeps):
    def made(self) -> Any:
        return Counter()

    def calls(self) -> int:
        self.kept["calls"] += 1
        return self.kept["calls"]


class InDeque(Keeps):
    def made(self) -> Any:
        return deque()

    def calls(self) -> int:
        self.kept.append(1)
        return len(self.kept)


class InListInDict(Keeps):
    def made(self) -> Any:
        return {"lengths": []}

    def calls(self) -> int:
        self.kept["lengths"].append(1)
        return len(self.kept["lengths"])


class InGenerator(Keeps):
    def made(self) -> Any:
        return iter(range(10**6))


class InCountOfFile(Keeps):
    def calls(self) -> int:
        return next(COUNT)


def _around(kept: list[int]) -> type:
    calls = 0

    class Around(Keeps):
        def calls(self) -> int:
            kept.append(1)
            return len(kept)

    class AroundAsNumber(Keeps):
        def calls(self) -> int:
            nonlocal calls
            calls += 1
            return calls

    return Around if kept else AroundAsNumber


class AsksCacheForLayers(Layer):
    """Goes another way if the cache does not answer."""

    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        try:
            tokens = given["cache"].layers[self.layer_idx].keys.shape[-2]
        except (AttributeError, IndexError):
            tokens = 0
        y = super().both(x, given)
        return y * 1.5 if tokens > 60 else y


class AsksWhetherCacheHasLayers(Layer):
    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        cache, tokens = given["cache"], 0
        if hasattr(cache, "layers") and len(cache.layers) > self.layer_idx:
            tokens = cache.get_seq_length(self.layer_idx)
        y = super().both(x, given)
        return y * 1.5 if tokens > 60 else y


class BatchStatistics(Layer):
    """Watches its results, and does nothing with what it sees."""

    def __init__(self, config: Config, layer_idx: int, pieces: Pieces):
        super().__init__(config, layer_idx, pieces)
        self.register_buffer("mean", torch.zeros(config.hidden_size))
        self.register_buffer("variance", torch.ones(config.hidden_size))

    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        y = super().both(x, given)
        F.batch_norm(torch.cat((y, y)).flatten(0, 1), self.mean, self.variance, training=True)
        return y


# ---- the index ----


class UpdatesKeywords(Layer):
    """An `update` that has nothing to do with its index."""

    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        more: dict[str, Any] = {}
        more.update(given)
        x = x + self.attended(x, more) * (1 + 0.5 * self.layer_idx)
        return x + self.transformed(x)


class IndexTwice(Attention):
    """Says with its index where it appends, and scales by it."""

    def append_and_attend(self, q: Tensor, k: Tensor, v: Tensor, cache: Any, mask: Any, **kwargs: Any) -> Any:
        index = self.layer_idx
        if cache is not None:
            k, v = cache.update(k, v, index)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        return attend(self, q, k, v, mask, dropout=0.0, scaling=self.scaling * (1 + 0.5 * index))

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Any]:
        q, k = self.rotate(q, k, *given["position_embeddings"])
        out, weights = self.append_and_attend(q, k, v, given["cache"], given["attention_mask"])
        return self.output(out), weights


class OwnConfig(Layer):
    """A copy of the config in which the factor of its branches depends on the layer."""

    def __init__(self, config: Config, layer_idx: int, pieces: Pieces):
        super().__init__(config, layer_idx, pieces)
        self.config = copy.deepcopy(config)
        self.config.branch_scale = 1 + 0.5 * layer_idx

    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        x = x + self.attended(x, given) * self.config.branch_scale
        return x + self.transformed(x) * self.config.branch_scale


# ---- questions ----


class AsksForDevice(Layer):
    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        y = super().both(x, given)
        return y * 1.5 if x.device.type == "cpu" else y


class AsksForGradient(Layer):
    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        y = super().both(x, given)
        return y * 1.5 if self.mlp.up_proj.weight.requires_grad else y


class SetsDtype(Layer):
    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        torch.set_default_dtype(torch.float32)
        return super().both(x, given)


_KEPT = (*WORDS["state"], "kept")
CASES = (
    Case("counts in a counter", LEFT, layer=InCounter, words=_KEPT, like=None),
    Case("counts in a list in a dict", LEFT, layer=InListInDict, words=_KEPT, like=None),
    Case("asks the cache for layers", LEFT, layer=AsksCacheForLayers, words=WORDS["state"]),
    Case("an update besides the index", EITHER, layer=UpdatesKeywords),
    Case("its index twice", EITHER, attention=IndexTwice),
    Case("a config of its own", EITHER, layer=OwnConfig),
    Case("asks for the device", LEFT, layer=AsksForDevice, words=("device",)),
)
VARIANTS = (
    Case("counts in a count", LEFT, layer=Keeps, words=_KEPT, like=None),
    Case("counts in a deque", LEFT, layer=InDeque, words=_KEPT, like=None),
    Case("counts in an iterator", LEFT, layer=InGenerator, words=_KEPT, like=None),
    Case("counts in a count of its file", LEFT, layer=InCountOfFile, words=("COUNT",), like=None),
    Case("counts in a list around it", LEFT, layer=_around([1]), words=_KEPT, like=None),
    Case("counts in a number around it", LEFT, layer=_around([]), words=("state", "calls"), like=None),
    Case("asks whether the cache has layers", LEFT, layer=AsksWhetherCacheHasLayers, words=WORDS["state"]),
    Case("statistics of batches", LEFT, layer=BatchStatistics, words=WORDS["state"], like=None),
    Case("asks for gradients", LEFT, layer=AsksForGradient, words=("requires_grad",)),
    Case("sets the default dtype", LEFT, layer=SetsDtype, words=("default",), like=None),
)
