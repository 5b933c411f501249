"""DeepSpeed's mixture layer in evaluation mode, without a capacity limit: no token is dropped."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from infuse.architectures.foreign.deepspeed import RoutedShape
from infuse.ground.errors import UnsupportedCall
from infuse.layers.gradient import is_recorded, unrecorded
from infuse.layers.mixture.experts import Experts
from infuse.parallel.group import Combine


class Routed(Experts):
    """Gate and experts of one layer. All ranks compute the same gate, and each its own experts.

    forward(hidden_states [..., H], used_token=None) → [..., H]. Like DeepSpeed's, it sets `l_aux`, the gate's loss,
    and `exp_counts` [E], the number of tokens per expert.
    """

    wg: Tensor
    shape: RoutedShape

    def __init__(
        self, shape: RoutedShape, formats: Mapping[str, str], bodies: Mapping[str, str], combine: Combine | None = None
    ):
        super().__init__(shape, formats, bodies, combine)
        # A buffer, so that it keeps its dtype: the gate runs in float32.
        self.register_buffer("wg", torch.empty(shape.all_experts, shape.hidden))
        self.l_aux: Tensor | None = None
        self.exp_counts: Tensor | None = None

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> Tensor:  # type: ignore[override]
        if torch.is_grad_enabled() and is_recorded(self, hidden_states):
            return unrecorded(Routed.forward, self, hidden_states, used_token)
        if used_token is not None:
            raise UnsupportedCall("used_token: a mask of tokens was given; possible: None, which computes all tokens")
        x_TH = hidden_states.reshape(-1, self.shape.hidden)
        index_TK, weights_TK = self._routes(x_TH)
        return super().forward(x_TH, index_TK, weights_TK.to(x_TH.dtype)).view(hidden_states.shape)

    def _routes(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts of each token and their weights: gate scores, normalized to sum 1 if there are several."""
        routes, count = self.shape.routes, self.shape.all_experts
        logits_TE = F.linear(x_TH.float(), self.wg.detach().float())
        scores_TE = logits_TE.softmax(dim=1)
        index_TK = scores_TE.argmax(dim=1, keepdim=True)  # ties go to the first, which topk does not guarantee
        if routes == 2:
            second_T1 = logits_TE.scatter(1, index_TK, float("-inf")).argmax(dim=1, keepdim=True)
            index_TK = torch.cat([index_TK, second_T1], dim=1)
        elif routes > 2:
            index_TK = logits_TE.topk(routes, dim=1).indices
        chosen_TE = torch.zeros_like(scores_TE).scatter(1, index_TK, 1.0)
        first_TE = chosen_TE if routes > 2 else torch.zeros_like(scores_TE).scatter(1, index_TK[:, :1], 1.0)
        self.exp_counts = chosen_TE.sum(dim=0).long()
        self.l_aux = (scores_TE.mean(dim=0) * first_TE.mean(dim=0)).mean() * count * count
        if routes > 2:
            self.l_aux = self.l_aux / routes
        weights_TK = scores_TE.gather(1, index_TK)
        if routes > 1:
            weights_TK = weights_TK / weights_TK.sum(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).eps)
        return index_TK, weights_TK
