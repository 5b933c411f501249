"""Experts whose callers do not pass routes: each class converts its original's call to routes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

from infuse.architectures.parts.experts import BATCHES, EVERY, ONE_HOT, ROUTES
from infuse.layers.mixture.experts import Experts


class BatchedExperts(Experts):
    """forward(hidden_states [B, T, H], top_k_index [B T, K], top_k_weights [B T, K]) → [B, T, H]."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        return super().forward(x_TH, top_k_index, top_k_weights).view(len(hidden_states), -1, x_TH.shape[-1])


class OneHotExperts(Experts):
    """forward(hidden_states [T, H], selected_experts [T, 1, E], routing_weights [T, 1]) → [T, H].

    A token without a 1 in its row has no expert, and its result is zero.
    """

    def forward(self, hidden_states: Tensor, selected_experts: Tensor, routing_weights: Tensor) -> Tensor:
        chosen_T1, index_T1 = selected_experts.max(dim=-1)
        return super().forward(hidden_states, index_T1.masked_fill(chosen_T1 == 0, -1), routing_weights)


class EveryExpert(Experts):
    """forward(hidden_states [E T, H]) → [E T, H]: T tokens for each expert, zeros where it is not chosen.

    Experts without biases give zero for zeros, so only the other rows are computed.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        x_NH = hidden_states.view(-1, hidden_states.shape[-1])
        rows_R = x_NH.ne(0).any(dim=-1).nonzero()[:, 0]
        index_R1 = (rows_R // (len(x_NH) // self.num_experts)).unsqueeze(1)
        y_RH = super().forward(x_NH[rows_R], index_R1, x_NH.new_ones(len(rows_R), 1))
        return x_NH.new_zeros(x_NH.shape).index_copy(0, rows_R, y_RH)


CALLED: Mapping[str, type[Experts]] = MappingProxyType(
    {ROUTES: Experts, BATCHES: BatchedExperts, ONE_HOT: OneHotExperts, EVERY: EveryExpert}
)
