"""Attention written out with matrix products, and changes to its scores and weights. See tests/reading/layers.py for
the legend.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.reading.cases import DECODER, EITHER, LEFT, READ, Case
from tests.reading.layers import Attention, Config, repeat_kv

EAGER = {"attn_implementation": "eager"}  # where the model passes a mask to every call


class WrittenOut(Attention):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.matmul(q, k.transpose(2, 3)) * self.scaling

    def masked(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores if mask is None else scores + mask

    def weights(self, scores: Tensor) -> Tensor:
        return F.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, Any]:
        k, v = repeat_kv(k, self.num_key_value_groups), repeat_kv(v, self.num_key_value_groups)
        weights = self.weights(self.masked(self.scores(q, k), mask))
        weights = F.dropout(weights, p=self.attention_dropout, training=self.training)
        return torch.matmul(weights, v).transpose(1, 2).contiguous(), weights


class Softcapped(WrittenOut):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return 2.0 * torch.tanh(super().scores(q, k) / 2.0)


class SoftcappedUnevenly(WrittenOut):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return 2.0 * torch.tanh(super().scores(q, k) / 2.1)


class SoftcappedWithMask(WrittenOut):
    """The cap is on the sum of scores and mask, so hidden keys have a little weight."""

    def masked(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return 5.0 * torch.tanh(super().masked(scores, mask) / 5.0)


class ScoresClamped(WrittenOut):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k).clamp(-1.0, 1.0)


class ScoresOtherScale(WrittenOut):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k) * 1.01


class BiasedByDistance(WrittenOut):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        keys = torch.arange(k.shape[2], device=k.device)
        queries = torch.arange(q.shape[2], device=k.device) + k.shape[2] - q.shape[2]
        return super().scores(q, k) - 0.1 * (queries[:, None] - keys).abs()


class BiasedByTable(WrittenOut):
    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        size = config.max_position_embeddings
        self.register_buffer("table", torch.linspace(0, 1, size).sin().expand(size, size).clone(), persistent=False)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k) + self.table[: q.shape[2], : k.shape[2]]


class Windowed(WrittenOut):
    def masked(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        keys = torch.arange(scores.shape[3], device=scores.device)
        queries = torch.arange(scores.shape[2], device=scores.device) + scores.shape[3] - scores.shape[2]
        return super().masked(scores, mask).masked_fill(queries[:, None] - keys >= 8, -1e9)


class ItselfExcluded(WrittenOut):
    def masked(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        queries, keys = scores.shape[2:]
        diagonal = torch.eye(keys, device=scores.device)[keys - queries :]
        return super().masked(scores, mask) - 1e4 * diagonal


class MaskSoftened(WrittenOut):
    def masked(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores if mask is None else scores + mask.clamp(min=-3.0)


class MaskAfterSoftmax(WrittenOut):
    def masked(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        weights = F.softmax(scores, dim=-1)
        return weights if mask is None else weights * (mask > -1)

    def weights(self, scores: Tensor) -> Tensor:
        return scores


class OtherAxis(WrittenOut):
    def weights(self, scores: Tensor) -> Tensor:
        return F.softmax(scores, dim=-2)


class SoftmaxWrittenOut(WrittenOut):
    def weights(self, scores: Tensor) -> Tensor:
        exponents = torch.exp(scores - scores.amax(-1, keepdim=True))
        return exponents / exponents.sum(-1, keepdim=True)


class SoftmaxPlusOne(WrittenOut):
    def weights(self, scores: Tensor) -> Tensor:
        exponents = torch.exp(scores)
        return exponents / (1 + exponents.sum(-1, keepdim=True))


class Sigmoids(WrittenOut):
    def weights(self, scores: Tensor) -> Tensor:
        return torch.sigmoid(scores)


class SoftmaxSquared(WrittenOut):
    def weights(self, scores: Tensor) -> Tensor:
        return super().weights(scores).square()


class Sinks(WrittenOut):
    """A logit per head joins the softmax."""

    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.sinks = nn.Parameter(torch.ones(config.num_attention_heads))

    def weights(self, scores: Tensor) -> Tensor:
        sinks = self.sinks.view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        return F.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]


class SoftmaxInHalf(WrittenOut):
    def weights(self, scores: Tensor) -> Tensor:
        return F.softmax(scores.clamp(min=-1e4).to(torch.float16), dim=-1).to(scores.dtype)


LIKE = replace(DECODER, attention=WrittenOut)
CASES = (
    Case("attention written out", READ, attention=WrittenOut, config=EAGER, like=None),
    Case("softcapped", READ, attention=Softcapped, config=EAGER, like=LIKE),
    Case("biased by distance", LEFT, attention=BiasedByDistance, config=EAGER, like=LIKE),
    Case("biased by a table", LEFT, attention=BiasedByTable, config=EAGER, like=LIKE, words=("on a size",)),
    Case("windowed", LEFT, attention=Windowed, config=EAGER, like=LIKE),
    Case("itself excluded", LEFT, attention=ItselfExcluded, config=EAGER, like=LIKE),
    Case("softmax over another axis", LEFT, attention=OtherAxis, config=EAGER, like=LIKE),
)
VARIANTS = (
    Case("softcapped unevenly", READ, attention=SoftcappedUnevenly, config=EAGER, like=LIKE),
    Case("softcapped with the mask", LEFT, attention=SoftcappedWithMask, config=EAGER, like=LIKE),
    Case("scores clamped", LEFT, attention=ScoresClamped, config=EAGER, like=LIKE),
    Case("scores of another scale", READ, attention=ScoresOtherScale, config=EAGER, like=LIKE),
    Case("mask softened", LEFT, attention=MaskSoftened, config=EAGER, like=LIKE),
    Case("mask after the softmax", LEFT, attention=MaskAfterSoftmax, config=EAGER, like=LIKE),
    Case("softmax written out", EITHER, attention=SoftmaxWrittenOut, config=EAGER, like=None),
    Case("softmax plus one", LEFT, attention=SoftmaxPlusOne, config=EAGER, like=LIKE),
    Case("sigmoids for a softmax", LEFT, attention=Sigmoids, config=EAGER, like=LIKE),
    Case("softmax squared", LEFT, attention=SoftmaxSquared, config=EAGER, like=LIKE),
    Case("sinks", EITHER, attention=Sinks, config=EAGER, like=LIKE),
    Case("softmax in half precision", LEFT, attention=SoftmaxInHalf, config=EAGER, like=LIKE),
)
