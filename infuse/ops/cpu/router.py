"""The router of ops/router.py in C++, for few tokens (src/binding_router.cpp). PyTorch runs the others."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from infuse.ground.routing import (
    ACTIVATIONS,
    FLOAT32,
    LOGITS,
    MAX,
    PICKED,
    ROUNDED,
    SCORE,
    SIGMOID,
    SIGMOID_OF_SCORES,
    SOFTMAX,
    SOFTMAX_OF_SCORES,
    TOP2_SUM,
    WIDENED,
    Routing,
)
from infuse.native import DTYPES, kernels, limits, needs
from infuse.ops.cpu.linear import fits
from infuse.ops.router import router

# In the order of the enums in src/binding_layer.h.
_LOGITS = (ROUNDED, WIDENED, FLOAT32)
_SCORES = (None, SOFTMAX, SIGMOID)
_WEIGHTS = (SCORE, PICKED, SOFTMAX_OF_SCORES, SIGMOID_OF_SCORES)
_CASTS = (None, ACTIVATIONS, LOGITS)


class RuleNumbers(NamedTuple):
    """A rule as the kernel reads it: the arguments of its operator after the tensors, and fields of RouterPart."""

    top_k: int
    logits: int
    score: int
    rounded_score: bool
    weights: int
    normalise: bool
    cast: int
    in_order: bool
    groups: int
    kept: int
    by_best: bool
    eps: float
    least: float
    scale: float
    fill: float


@cache
def numbers(rule: Routing, experts: int) -> RuleNumbers | None:
    """Return the rule for so many experts as the kernel reads it; None if the kernel does not support it."""
    ranks_two = rule.groups > rule.kept and rule.ranked_by == TOP2_SUM
    if rule.score not in _SCORES or rule.cap or not 1 <= rule.top_k <= experts:
        return None
    if experts % rule.groups or (ranks_two and experts // rule.groups < 2):
        return None
    return RuleNumbers(
        rule.top_k, _LOGITS.index(rule.logits), _SCORES.index(rule.score), bool(rule.rounded_score),
        _WEIGHTS.index(rule.weights), bool(rule.normalise), _CASTS.index(rule.cast), bool(rule.in_order), rule.groups,
        rule.kept, rule.ranked_by == MAX, float(rule.eps), float(rule.least), float(rule.scale), float(rule.fill),
    )  # fmt: skip


@router.implement("cpu", needs)
def _router(x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None, *routing: Any) -> Any:
    rule = numbers(Routing(*routing), weight.shape[0])
    if rule is None or not 1 <= len(x) <= limits().plain_rows or not _takes(x, weight, bias, correction, routing[1]):
        return router.reference(x, weight, bias, correction, *routing)
    return kernels().router.default(x.contiguous(), weight, bias, correction, *rule)


def _takes(x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None, logits: str) -> bool:
    exact = weight.dtype in (x.dtype, DTYPES[0]) or logits == FLOAT32  # x is converted without rounding
    known = x.dtype in DTYPES and weight.dtype in DTYPES and x.shape[1] == weight.shape[1] > 0
    corrected = correction is None or (correction.dtype in DTYPES and correction.is_contiguous())
    return exact and known and corrected and weight.is_contiguous() and fits(bias, weight.dtype)
