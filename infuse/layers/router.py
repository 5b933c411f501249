"""The router of a mixture: choose and weigh each token's experts, by the original's operations in its order.

Suffixes: T tokens, H hidden width, E experts, K experts of a token, G groups.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infuse.architectures.router import (
    ACTIVATIONS,
    FLOAT32,
    LOGITS,
    PICKED,
    SIGMOID,
    SIGMOID_OF_SCORES,
    SOFTMAX,
    SOFTMAX_OF_SCORES,
    SPARSE_MIXER,
    SQRT_SOFTPLUS,
    TOP2_SUM,
    WIDENED,
    RouterShape,
)

_OF_SCORES = {SOFTMAX_OF_SCORES: SOFTMAX, SIGMOID_OF_SCORES: SIGMOID}


class Router(nn.Module):
    """Built on meta; its weights are filled in later. They keep the compute dtype: formats do not apply to routers."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    correction: Tensor | None

    def __init__(self, shape: RouterShape):
        super().__init__()
        self.shape = shape

        def empty(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(sizes, device="meta"), requires_grad=False)

        self.weight = empty(shape.experts, shape.hidden)
        self.register_parameter("bias", empty(shape.experts) if shape.bias else None)
        if shape.correction_is_parameter:
            self.register_parameter("correction", empty(*shape.correction))
        else:  # a buffer keeps its dtype: rounding it would change which experts are chosen
            self.register_buffer("correction", empty(*shape.correction).data if shape.correction else None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits [T, E] as transformers records them, weights [T, K] and index [T, K] (int64) for x [..., H]."""
        shape, rule = self.shape, self.shape.rule
        x_TH = x.reshape(-1, shape.hidden)
        logits_TE = self._logits(x_TH)
        if rule.score == SPARSE_MIXER:
            return logits_TE, *sparse_mixer(logits_TE, shape.jitter)
        scores_TE = _scores(logits_TE if rule.rounded_score else logits_TE.float(), rule.score)
        choice_TE = scores_TE if self.correction is None else scores_TE + self.correction
        if shape.groups[0] > shape.groups[1]:
            choice_TE = self._of_best_groups(choice_TE)
        picked_TK, index_TK = torch.topk(choice_TE, shape.top_k, dim=-1, sorted=rule.in_order)
        weights_TK = picked_TK
        if rule.weights != PICKED and choice_TE is not scores_TE:
            weights_TK = scores_TE.gather(1, index_TK)
        if rule.weights in _OF_SCORES:
            weights_TK = _scores(weights_TK, _OF_SCORES[rule.weights])
        if shape.normalise:
            total_T1 = weights_TK.sum(dim=-1, keepdim=True)
            total_T1 = total_T1 + rule.eps if rule.eps else total_T1
            weights_TK = weights_TK / (total_T1.clamp(min=shape.least) if shape.least else total_T1)
        if shape.scale != 1.0:
            weights_TK = weights_TK * shape.scale
        if rule.cast is not None:
            weights_TK = weights_TK.to({ACTIVATIONS: x, LOGITS: logits_TE}[rule.cast].dtype)
        return logits_TE, weights_TK, index_TK

    def _logits(self, x_TH: Tensor) -> Tensor:
        rule, weight, bias = self.shape.rule, self.weight, self.bias
        if rule.logits == FLOAT32:
            logits = F.linear(x_TH.float(), weight.float(), None if bias is None else bias.float())
        else:
            logits = F.linear(x_TH.to(weight.dtype), weight, bias)
        if rule.logits == WIDENED:
            logits = logits.float()
        return torch.tanh(logits / self.shape.cap) * self.shape.cap if self.shape.cap else logits

    def _of_best_groups(self, choice_TE: Tensor) -> Tensor:
        """Set the scores of experts outside the best groups to the rule's fill."""
        groups, (count, kept) = self.shape.rule.groups, self.shape.groups
        assert groups is not None
        grouped = choice_TE.unflatten(1, (count, -1))
        best_TG = grouped.topk(2, dim=-1)[0].sum(dim=-1) if groups.by == TOP2_SUM else grouped.max(dim=-1).values
        kept_TK = torch.topk(best_TG, kept, dim=-1, sorted=self.shape.rule.in_order)[1]
        dropped_TG = torch.ones_like(best_TG, dtype=torch.bool).scatter_(1, kept_TK, False)
        return grouped.masked_fill(dropped_TG.unsqueeze(-1), groups.fill).flatten(1)

    def extra_repr(self) -> str:
        return f"experts={self.shape.experts}, top_k={self.shape.top_k}"


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
