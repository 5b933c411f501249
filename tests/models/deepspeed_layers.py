"""Layers shaped as deepspeed.moe.layer.MoE and what is in it, without DeepSpeed: for one process, and evaluation only.

Written from the documented behaviour of DeepSpeed's gates: capacity, drops, random selection and sampling included.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
import transformers as t
from torch import Tensor, nn

from tests.models.families import GPT, enlarge


class TopKGate(nn.Module):
    def __init__(
        self, width: int, experts: int, k: int, eval_capacity_factor: float = 1.0, min_capacity: int = 4,
        drop_tokens: bool = True, use_rts: bool = True, top2_2nd_expert_sampling: bool = True,
    ):  # fmt: skip
        super().__init__()
        self.wg = nn.Linear(width, experts, bias=False)
        self.k, self.eval_capacity_factor, self.min_capacity = k, eval_capacity_factor, min_capacity
        self.drop_tokens, self.use_rts, self.top2_2nd_expert_sampling = drop_tokens, use_rts, top2_2nd_expert_sampling

    def forward(self, x: Tensor, used_token: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """l_aux, weights [T, E] with zeros where an expert is not taken, counts [E]."""
        logits = F.linear(x.float(), self.wg.weight.float())
        gates, experts = logits.softmax(dim=1), logits.shape[1]
        first = F.one_hot(gates.argmax(dim=1), experts)
        if self.k == 2:
            noise = -torch.log(-torch.log(torch.rand_like(logits))) if self.top2_2nd_expert_sampling else 0.0
            second = (logits + noise).masked_fill(first.bool(), -math.inf).argmax(dim=1)
            masks = [first, F.one_hot(second, experts)]
        elif self.k == 1:
            masks = [first if used_token is None else first * used_token[:, None]]
        else:
            masks = [torch.zeros_like(first).scatter(1, logits.topk(self.k, dim=1).indices, 1)]
        counts = sum(masks).sum(dim=0)
        chosen = masks[0].float().mean(dim=0) / (self.k if self.k > 2 else 1)
        l_aux = (gates.mean(dim=0) * chosen).mean() * experts * experts
        taken = sum(self._kept(mask, before) for mask, before in zip(masks, (0, first.sum(dim=0)), strict=False))
        weights = gates * taken
        if self.k > 1:
            weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).eps)
        return l_aux, weights, counts

    def _kept(self, mask: Tensor, before: Any) -> Tensor:
        """The mask without the tokens beyond an expert's capacity."""
        if not self.drop_tokens:
            return mask
        capacity = max(math.ceil(len(mask) / mask.shape[1] * self.eval_capacity_factor * self.k), self.min_capacity)
        if self.k == 1 and self.use_rts:
            order = mask * torch.rand(mask.shape)
            return mask * torch.zeros_like(mask).scatter(0, order.topk(min(capacity, len(mask)), dim=0).indices, 1)
        return mask * (mask.cumsum(dim=0) - 1 + before < capacity)


class Experts(nn.Module):
    def __init__(self, expert: nn.Module, count: int):
        super().__init__()
        self.deepspeed_experts = nn.ModuleList([copy.deepcopy(expert) for _ in range(count)])
        self.num_local_experts = count


class MOELayer(nn.Module):
    def __init__(self, gate: TopKGate, experts: Experts):
        super().__init__()
        self.gate, self.experts = gate, experts

    def forward(self, *given: Tensor | None) -> Tensor:
        x, used_token = given
        assert x is not None
        tokens = x.reshape(-1, x.shape[-1])
        self.l_aux, weights, self.exp_counts = self.gate(tokens, used_token)
        outs = [expert(tokens) for expert in self.experts.deepspeed_experts]
        rows = torch.stack([out[0] if isinstance(out, tuple) else out for out in outs], dim=1)
        return torch.einsum("se,sem->sm", weights.type_as(x), rows).reshape(x.shape)


class MoE(nn.Module):
    def __init__(self, width: int, expert: nn.Module, experts: int, k: int, use_residual: bool = False, **gate: Any):
        super().__init__()
        self.use_residual, self.num_experts = use_residual, experts
        self.deepspeed_moe = MOELayer(TopKGate(width, experts, k, **gate), Experts(expert, experts))
        if use_residual:
            self.mlp, self.coefficient = expert, nn.Linear(width, 2)

    def forward(self, x: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        out = self.deepspeed_moe(x, used_token)
        if self.use_residual:
            beside = self.mlp(x)
            shares = self.coefficient(x).softmax(dim=-1)
            out = out * shares[..., 0:1] + (beside[0] if isinstance(beside, tuple) else beside) * shares[..., 1:]
        return out, self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts


class ParallelMLP(nn.Module):
    """An expert as Megatron-DeepSpeed writes it: its result is a tuple."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x))), None


class Gated(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.up, self.gate = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * F.silu(self.gate(x)))


class Feed(nn.Module):
    """A feed-forward part that drops what DeepSpeed's layer says beside its output."""

    def __init__(self, moe: MoE):
        super().__init__()
        self.moe = moe

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x)[0]


def mixture(counts: tuple[int, ...] = (4, 6), k: int = 2, expert: type = ParallelMLP, **keys: Any) -> Any:
    """A small GPT-2 whose layers have as many experts as `counts` says (0: none)."""
    torch.manual_seed(0)
    model = t.GPT2LMHeadModel(t.GPT2Config(**dict(GPT, n_layer=len(counts)))).eval()
    for block, count in zip(model.transformer.h, counts, strict=True):
        if count:
            block.mlp = Feed(MoE(48, expert(48, 80), count, k, **keys))
    enlarge(model)
    model.generation_config.eos_token_id = None
    return model.eval()
