"""Router of a mixture: choose and weigh each token's experts by the original's operations, in their order.

Suffixes: T tokens, H hidden width, E experts, K experts of a token, G groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from infuse.ground.routing import (
    ACTIVATIONS,
    FLOAT32,
    LOGITS,
    MAX,
    PICKED,
    SIGMOID,
    SIGMOID_OF_SCORES,
    SOFTMAX,
    SOFTMAX_OF_SCORES,
    SPARSE_MIXER,
    SQRT_SOFTPLUS,
    TOP2_SUM,
    WIDENED,
    Routing,
)
from infuse.ops.op import Case, op

_OF_SCORES = {SOFTMAX_OF_SCORES: SOFTMAX, SIGMOID_OF_SCORES: SIGMOID}


@op(
    "router(Tensor x, Tensor weight, Tensor? bias, Tensor? correction, int top_k, str logits, str? score,"
    " bool rounded_score, str weights, bool normalise, float eps, float least, float scale, str? cast, bool in_order,"
    " int groups, int kept, str ranked_by, float fill, float cap, float jitter) -> (Tensor, Tensor, Tensor)"
)
def router(
    x_TH: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None, *routing: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits [T, E] as transformers records them, weights [T, K] and index [T, K] (int64).

    `weight` [E, H] and `bias` [E] give the logits; `correction` [E] is added to the scores before experts are chosen.
    The rest is a Routing. Equal logits give the same experts and the same bits of weights in every body.
    """
    rule = Routing(*routing)
    logits_TE = _logits(x_TH, weight, bias, rule)
    if rule.score == SPARSE_MIXER:
        return logits_TE, *sparse_mixer(logits_TE, rule.jitter)
    scores_TE = _scores(logits_TE if rule.rounded_score else logits_TE.float(), rule.score)
    choice_TE = scores_TE if correction is None else scores_TE + correction
    if rule.groups > rule.kept:
        choice_TE = _of_best_groups(choice_TE, rule)
    picked_TK, index_TK = torch.topk(choice_TE, rule.top_k, dim=-1, sorted=rule.in_order)
    weights_TK = picked_TK
    if rule.weights != PICKED and choice_TE is not scores_TE:
        weights_TK = scores_TE.gather(1, index_TK)
    if rule.weights in _OF_SCORES:
        weights_TK = _scores(weights_TK, _OF_SCORES[rule.weights])
    if rule.normalise:
        total_T1 = weights_TK.sum(dim=-1, keepdim=True)
        total_T1 = total_T1 + rule.eps if rule.eps else total_T1
        weights_TK = weights_TK / (total_T1.clamp(min=rule.least) if rule.least else total_T1)
    if rule.scale != 1.0:
        weights_TK = weights_TK * rule.scale
    if rule.cast is not None:
        weights_TK = weights_TK.to({ACTIVATIONS: x_TH, LOGITS: logits_TE}[rule.cast].dtype)
    return logits_TE, weights_TK, index_TK


def _logits(x_TH: Tensor, weight: Tensor, bias: Tensor | None, rule: Routing) -> Tensor:
    if rule.logits == FLOAT32:
        logits = F.linear(x_TH.float(), weight.float(), None if bias is None else bias.float())
    else:
        logits = F.linear(x_TH.to(weight.dtype), weight, bias)
    if rule.logits == WIDENED:
        logits = logits.float()
    return torch.tanh(logits / rule.cap) * rule.cap if rule.cap else logits


def _of_best_groups(choice_TE: Tensor, rule: Routing) -> Tensor:
    """Set the values of experts outside the best groups to the rule's fill."""
    grouped = choice_TE.unflatten(1, (rule.groups, -1))
    best_TG = grouped.topk(2, dim=-1)[0].sum(dim=-1) if rule.ranked_by == TOP2_SUM else grouped.max(dim=-1).values
    kept_TK = torch.topk(best_TG, rule.kept, dim=-1, sorted=rule.in_order)[1]
    dropped_TG = torch.ones_like(best_TG, dtype=torch.bool).scatter_(1, kept_TK, False)
    return grouped.masked_fill(dropped_TG.unsqueeze(-1), rule.fill).flatten(1)


def _scores(logits: Tensor, score: str | None) -> Tensor:
    """The scores in the dtype of `logits`."""
    if score == SOFTMAX:
        return logits.softmax(dim=-1)
    if score == SIGMOID:
        return logits.sigmoid()
    return F.softplus(logits).sqrt() if score == SQRT_SOFTPLUS else logits


def sparse_mixer(logits_TE: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Weights and index [T, 2] of SparseMixer (https://arxiv.org/abs/2409.12136) in evaluation.

    The best expert, then the best of the others; each weight is a softmax over the experts whose logits are within
    a relative distance of 2 * jitter from the best.
    """
    weights, chosen, left_TE = [], [], logits_TE
    for _ in range(2):
        best_T1, index_T1 = left_TE.max(dim=-1, keepdim=True)
        far_TE = ((best_T1 - logits_TE) / logits_TE.abs().clamp(min=best_T1)) > 2 * jitter
        near_TE = left_TE.masked_fill(far_TE, float("-inf")).softmax(dim=-1)
        weights.append(near_TE.gather(-1, index_T1))
        chosen.append(index_T1)
        left_TE = logits_TE.scatter(-1, index_T1, float("-inf"))
    return torch.cat(weights, dim=-1), torch.cat(chosen, dim=-1)


@router.flops
def _flops(x: Sequence[int], weight: Sequence[int], *_: Any) -> int:
    return 2 * prod(x) * weight[0]


@router.fake
def _fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return router.reference(*arguments)


# Tokens, experts, hidden width, bias, correction, rule. More rules and dtypes: tests/ops/cpu/test_router.py.
_CASES = (
    (1, 8, 64, False, False, Routing(2, normalise=True, cast=ACTIVATIONS)),
    (3, 4, 33, True, False, Routing(4, weights=SOFTMAX_OF_SCORES, score=None, cast=LOGITS)),
    (8, 128, 48, False, False, Routing(1, score=SIGMOID, scale=2.5, cast=ACTIVATIONS)),
    (2, 1, 16, False, False, Routing(1, normalise=True, least=0.5, cast=ACTIVATIONS)),
    (
        5,
        16,
        40,
        True,
        True,
        Routing(
            3, score=SIGMOID, normalise=True, eps=1e-20, scale=1.5, cast=ACTIVATIONS, in_order=False, groups=4, kept=2
        ),
    ),
    (4, 12, 32, False, False, Routing(2, weights=PICKED, cast=ACTIVATIONS, groups=3, kept=1, ranked_by=MAX, fill=0.0)),
    (9, 8, 64, False, False, Routing(2, cast=ACTIVATIONS)),
    (2, 6, 32, False, False, Routing(2, score=SPARSE_MIXER, jitter=0.05)),
)


@router.cases
def _cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Small whole numbers: logits are exact in any order of the sum, and many are equal."""

    def whole(*sizes: int) -> Tensor:
        return torch.randint(-1, 2, sizes, device=device).to(dtype)

    for tokens, experts, width, biased, corrected, rule in _CASES:
        bias, correction = whole(experts) if biased else None, whole(experts) if corrected else None
        words = f"{rule.score} {rule.weights}{' bias' if biased else ''}{' correction' if corrected else ''}"
        label = f"{tokens} tokens, {rule.top_k} of {experts}, {words}"
        yield Case(label, (whole(tokens, width), whole(experts, width), bias, correction, *rule))
