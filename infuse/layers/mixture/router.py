"""The router of a mixture: choose and weigh each token's experts (ops/router.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from infuse import ops
from infuse.architectures.parts.router import (
    NormedRouterShape,
    RouterShape,
    ScoringRouterShape,
    Top1RouterShape,
    Top2RouterShape,
)
from infuse.layers.gradient import InferenceModule, is_recorded
from infuse.layers.linear import direct
from infuse.layers.native.part import NativePart, NotNative, PartWriter
from infuse.layers.norm import Norm
from infuse.ops.cpu.router import numbers


class Router(InferenceModule, NativePart):
    """Built on meta; its weights are filled in later. They keep the compute dtype: formats do not apply to routers."""

    struct, mixed = "router", True

    weight: nn.Parameter
    bias: nn.Parameter | None
    correction: Tensor | None
    fed_index: Tensor
    fed_weights: Tensor

    def __init__(self, shape: RouterShape, bodies: Mapping[str, str] = MappingProxyType({})):
        super().__init__()
        self.shape, self._routing = shape, shape.routing
        self._route = ops.router.bound(bodies.get("router", ops.REFERENCE))
        self.feed()

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
        found = self._routes(x)
        if is_compiling() or not self.fed_index.numel():
            return found
        logits, weights, _ = found
        return logits, self.fed_weights.to(weights.dtype), self.fed_index

    def _routes(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        route: Any = self._route
        if torch.is_grad_enabled() and is_recorded(self, x):
            route = ops.router.bound(ops.REFERENCE)  # which has gradients, as lone linears do
        return route(x.reshape(-1, self.shape.hidden), self.weight, self.bias, self.correction, *self._routing)

    def feed(self, index: Tensor | None = None, weights: Tensor | None = None) -> None:
        """Return these from now on, index and weights [T, K], for calls with T tokens; without them, its own again."""
        nothing = torch.empty(0, dtype=torch.int64, device="cpu")
        self.fed_index = nothing if index is None else index.to(torch.int64).contiguous()
        self.fed_weights = nothing.float() if weights is None else weights.float().contiguous()

    def native(self, to: PartWriter) -> None:
        rule = numbers(self._routing, self.shape.experts)
        if rule is None:
            raise NotNative("the kernel does not know the router's rule")
        for name, value in rule._asdict().items():
            to.put_reals(**{name: value}) if isinstance(value, float) else to.put(**{name: value})
        to.tensor("weight")
        to.tensor("bias")
        to.tensor("correction")
        to.attribute("fed_index")
        to.attribute("fed_weights")
        to.part("norm")
        to.tensor("gain")
        to.tensor("gains")
        to.put_reals(factor=getattr(self.shape, "factor", 1.0))

    def extra_repr(self) -> str:
        return f"experts={self.shape.experts}, top_k={self.shape.top_k}"


class NormedRouter(Router):
    """A router with a norm of its own before the logits, and a factor for each expert.

    In place of the logits it returns their softmax in float32, as transformers records them.
    """

    shape: NormedRouterShape

    def __init__(self, shape: NormedRouterShape, bodies: Mapping[str, str] = MappingProxyType({})):
        super().__init__(shape, bodies)
        self.norm = Norm(shape.norm, bodies)
        self.gain = nn.Parameter(torch.empty(shape.hidden, device="meta"), requires_grad=False)
        self.gains = nn.Parameter(torch.empty(shape.experts, device="meta"), requires_grad=False)

    def _routes(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, index = super()._routes(direct(self.norm, x) * self.gain * self.shape.factor)
        return logits.softmax(dim=-1, dtype=torch.float32), weights * self.gains[index], index


class ScoringRouter(Router):
    """A router that returns the scores of all experts, zeros where they are not chosen, and the logits, [T, E] each."""

    def __init__(self, shape: ScoringRouterShape, bodies: Mapping[str, str] = MappingProxyType({})):
        super().__init__(shape, bodies)
        self.top_k = shape.top_k

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits_TE, weights_TK, index_TK = super().forward(x)
        return torch.zeros_like(logits_TE).scatter(1, index_TK, weights_TK.to(logits_TE.dtype)), logits_TE

    def _routes(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Chosen by logits, weighed by their sigmoid: of all experts at once, as bits depend on a tensor's length."""
        logits_TE, picked_TK, index_TK = super()._routes(x)
        hidden_TE = torch.full_like(logits_TE, float("-inf")).scatter(1, index_TK, picked_TK)
        return logits_TE, hidden_TE.float().sigmoid().to(logits_TE.dtype).gather(1, index_TK), index_TK


class Top1Router(Router):
    """A router of rows of tokens whose experts take a number of tokens of each row: later ones get none.

    forward(x [B, T, H]) returns the chosen experts as ones in a mask [B, T, E], weights [B, T, 1], logits [B, T, E].
    """

    shape: Top1RouterShape

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_BTE, scores_BTE = self._scored(x)
        mask_BTE = _one_hot(scores_BTE)
        mask_BTE = mask_BTE * (mask_BTE.cumsum(dim=-2) <= self.shape.capacity)
        return self._told((mask_BTE, scores_BTE.amax(dim=-1, keepdim=True), logits_BTE))

    def _scored(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and, in the dtype of `x`, their softmax."""
        dtype, bias = getattr(torch, self.shape.dtype), self._parameters["bias"]
        logits = F.linear(x.to(dtype), self.weight.to(dtype), None if bias is None else bias.to(dtype))
        return logits, logits.softmax(dim=-1, dtype=dtype).to(x.dtype)

    def _told(self, found: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        if is_compiling() or not self.fed_index.numel():
            return found
        return _mask_of_routes(found, self.fed_weights, self.fed_index)

    def native(self, to: PartWriter) -> None:
        raise NotNative("experts drop tokens beyond their capacity")


class Top2Router(Top1Router):
    """A router whose experts take a number of the call's tokens, first choices before second ones.

    forward(x [T, H], mask of padding) returns the first choices as ones in a mask [T, E], the weights of both [T, E],
    and logits [T, E]. The mask is that of attention, [B, 1, T, L], which the original flattens; True or a number other
    than 0 is padding.
    """

    shape: Top2RouterShape

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        shape, tokens = self.shape, len(x)
        logits_TE, scores_TE = self._scored(x)
        first_TE = _one_hot(scores_TE)
        second_TE = _one_hot(logits_TE.masked_fill(first_TE.bool(), float("-inf")))
        chosen = first_TE, second_TE
        if padding_mask is not None and not shape.ignores_padding:
            if padding_mask.dim() == 4:
                padding_mask = padding_mask[:, :, -1, :].reshape(-1)[-tokens:]
            real_T1 = ~padding_mask.bool().unsqueeze(-1)
            first_TE, second_TE = first_TE * real_T1, second_TE * real_T1
        capacity = math.ceil(shape.fraction * tokens) if shape.fraction > 0 else shape.capacity
        order_T = (-scores_TE.amax(dim=1)).argsort(dim=0) if shape.by_priority else None
        before = first_TE.sum(dim=0)
        first_TE = first_TE * (_places(first_TE, order_T) < capacity)
        second_TE = second_TE * (_places(second_TE, order_T) + before < capacity)
        weighed = chosen if shape.normalises_first else (first_TE, second_TE)
        of_first_T1, of_second_T1 = self._normalised(scores_TE, *weighed)
        return self._told((first_TE, of_first_T1 * first_TE + of_second_T1 * second_TE, logits_TE))

    def _normalised(self, scores_TE: Tensor, first_TE: Tensor, second_TE: Tensor) -> tuple[Tensor, Tensor]:
        """The scores of first and second choices, divided by their sum."""
        first_T1, second_T1 = ((scores_TE * mask).sum(dim=1, keepdim=True) for mask in (first_TE, second_TE))
        total_T1 = (first_T1 + second_T1).clamp(min=torch.finfo(scores_TE.dtype).eps)
        return first_T1 / total_T1, second_T1 / total_T1


def _one_hot(scores: Tensor) -> Tensor:
    """A one where each row is largest, first of all where several are."""
    return torch.zeros_like(scores, dtype=torch.int64).scatter(-1, scores.argmax(dim=-1, keepdim=True), 1)


def _places(mask_TE: Tensor, order_T: Tensor | None) -> Tensor:
    """How many tokens before each, in this order, chose the same expert."""
    if order_T is None:
        return mask_TE.cumsum(dim=0) - 1
    sorted_TE = mask_TE[order_T]
    return ((sorted_TE.cumsum(dim=0) - 1) * sorted_TE)[order_T.argsort(dim=0)]


def routes_in(returned: tuple[Tensor, ...], top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [T, E], weights and index [T, K] in what a router returned; -1 where a token has no expert.

    These three; the scores of all experts and the logits; or a mask, weights and logits (Top1Router, Top2Router).
    """
    if _is_mask(returned[0]):
        return _routes_of_mask(*returned)
    if len(returned) == 3:
        return returned
    scores_TE, logits_TE = returned
    return logits_TE, *scores_TE.topk(top_k, dim=-1)


def _is_mask(tensor: Tensor) -> bool:
    return not tensor.is_floating_point()


def _routes_of_mask(mask: Tensor, weights: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mask_TE, weights_TK, logits_TE = (tensor.flatten(0, -2) for tensor in (mask, weights, logits))
    chosen_T1, index_T1 = mask_TE.max(dim=-1, keepdim=True)
    if weights_TK.shape[1] == 1:
        return logits_TE, weights_TK, index_T1.masked_fill(chosen_T1 == 0, -1)
    # NLLB-MoE's experts take the entries of the mask for numbers of experts (_takes_masks in
    # architectures/parts/experts.py).
    of_ones_T1 = (weights_TK * mask_TE).sum(dim=1, keepdim=True)
    of_zeros_T1 = weights_TK.masked_fill(mask_TE != 0, 0.0).sum(dim=1, keepdim=True)
    numbers_T2 = torch.cat([torch.ones_like(index_T1), torch.zeros_like(index_T1)], dim=1)
    used_T2 = torch.cat([chosen_T1 != 0, of_zeros_T1 != 0], dim=1)
    return logits_TE, torch.cat([of_ones_T1, of_zeros_T1], dim=1), numbers_T2.masked_fill(~used_T2, -1)


def with_routes(returned: tuple[Tensor, ...], weights_TK: Tensor, index_TK: Tensor) -> tuple[Tensor, ...]:
    """What a router would have returned if it had chosen these."""
    if not _is_mask(returned[0]):
        if len(returned) == 3:
            return returned[0], weights_TK.to(returned[1].dtype), index_TK
        scores_TE, logits_TE = returned
        return torch.zeros_like(scores_TE).scatter(1, index_TK, weights_TK.to(scores_TE.dtype)), logits_TE
    mask, weights, logits = returned
    return _mask_of_routes((mask, weights, logits), weights_TK, index_TK)


def _mask_of_routes(
    returned: tuple[Tensor, Tensor, Tensor], weights_TK: Tensor, index_TK: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `_routes_of_mask`, in the shapes and dtypes of what a router returned."""
    mask, weights, logits = returned
    made_TE, chosen_TK = torch.zeros_like(mask).flatten(0, -2), index_TK >= 0
    if weights.shape[-1] == 1:
        made_TE.scatter_(1, index_TK.clamp(min=0), chosen_TK.to(mask.dtype))
        return made_TE.view_as(mask), weights_TK.to(weights.dtype).view_as(weights), logits
    made_TE[:, 0] = chosen_TK[:, 0]
    rest = weights.new_zeros(len(made_TE), made_TE.shape[1] - 2)
    return made_TE, torch.cat([weights_TK.to(weights.dtype), rest], dim=1), logits


_MADE: Mapping[type[RouterShape], type[Router]] = MappingProxyType(
    {
        RouterShape: Router,
        NormedRouterShape: NormedRouter,
        ScoringRouterShape: ScoringRouter,
        Top1RouterShape: Top1Router,
        Top2RouterShape: Top2Router,
    }
)


def make_router(shape: RouterShape, bodies: Mapping[str, str]) -> Router:
    """Make the empty router of this shape."""
    return _MADE[type(shape)](shape, bodies)
