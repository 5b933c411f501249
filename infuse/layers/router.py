"""The router of a mixture: choose and weigh each token's experts (ops/router.py)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from infuse import ops
from infuse.architectures.router import NormedRouterShape, RouterShape, ScoringRouterShape
from infuse.layers.gradient import InferenceModule, is_recorded
from infuse.layers.linear import direct
from infuse.layers.native_part import NativePart, NotNative, PartWriter
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


def routes_in(returned: tuple[Tensor, ...], top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, weights and index in what a router returned: these three, or the scores of all experts and the logits."""
    if len(returned) == 3:
        return returned
    scores_TE, logits_TE = returned
    return logits_TE, *scores_TE.topk(top_k, dim=-1)


def make_router(shape: RouterShape, bodies: Mapping[str, str]) -> Router:
    """Make the empty router of this shape."""
    if isinstance(shape, ScoringRouterShape):
        return ScoringRouter(shape, bodies)
    return NormedRouter(shape, bodies) if isinstance(shape, NormedRouterShape) else Router(shape, bodies)
