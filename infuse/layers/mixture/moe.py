"""The mixture part: the router chooses experts for each token; their weighed sum and a shared expert are added."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from infuse.architectures.inner_call import InnerCall
from infuse.architectures.parts.moe import AVERAGE, MoEShape
from infuse.layers.build_context import BuildContext
from infuse.layers.calls.called_part import has_listeners
from infuse.layers.gradient import InferenceModule
from infuse.layers.linear import direct, has_no_hooks
from infuse.layers.mixture.experts import Experts
from infuse.layers.mixture.router import make_router, routes_in
from infuse.layers.mlp import MLP
from infuse.layers.native.part import NativePart, PartWriter, decline_if
from infuse.layers.norm import Norm


class MoE(InferenceModule, NativePart):
    """A mixture. Over ranks, experts and shared expert give partial sums, which are added up once.

    `routes_texts`: the original's router gets [B, T, H], not [tokens, H].
    """

    struct, mixed = "moe", True
    _tells_weights = routes_texts = False

    def __init__(self, shape: MoEShape, context: BuildContext):
        super().__init__()
        name, self._combine = context.name, context.combine
        self.shape = shape
        partial = replace(context, combine=None)
        self.router = make_router(shape.router, context.bodies)
        inside = f"{name}.experts."
        held = {target.removeprefix(inside): format for target, format in context.formats.items() if inside in target}
        self.experts = Experts(shape.experts, held, context.bodies)
        shared = None if shape.shared is None else MLP(shape.shared, replace(partial, name=f"{name}.shared"))
        gate = nn.Linear(shape.router.hidden, 1, bias=False, device="meta") if shape.gated else None
        self.add_module("shared", shared)
        self.add_module("shared_gate", None if gate is None else gate.requires_grad_(False))
        for matrix in () if shape.latent is None else shape.latent.matrices:
            self.add_module(matrix.target, partial.linear(matrix))
        for name in ("norm", "post"):
            self.add_module(name, Norm(shape.norms[name], context.bodies) if name in shape.norms else None)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        """Return the result, in gpt-oss with the weights of experts, for x [..., H]. `mask`: the layer's, for routers
        that look at padding.
        """
        out, weights = self._weighed(x, mask)
        return (out, weights) if self._tells_weights else out

    def be_called(self, call: InnerCall, block: nn.Module) -> None:
        """Return what `call` does."""
        self._tells_weights = not call.alone

    def fused(self, x: Tensor, norm: nn.Module | None, residual: Tensor | None, mask: Tensor | None = None) -> Tensor:
        """Compute residual + self(norm(x)); x [..., H]."""
        out, _ = self._weighed(x if norm is None else direct(norm, x), mask)
        return out if residual is None else residual + out

    def _weighed(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The result, and each token's weights of its experts [T, K]."""
        held: dict[str, Any] = self._modules
        x_TH = x.reshape(-1, x.shape[-1])
        _, weights, index = routes_in(self._returned(held["router"], x, mask), self.shape.router.top_k)
        if held["norm"] is not None:
            x_TH = direct(held["norm"], x_TH)
        of_experts = self._of_weighed_inputs if self.shape.weighs_inputs else held["experts"]
        if self.shape.latent is None:
            out = of_experts(x_TH, index, weights)
        else:
            out = direct(held["latent_out"], of_experts(direct(held["latent_in"], x_TH), index, weights))
        if self.shape.scale != 1.0:
            out = out * self.shape.scale
        shared, gate = held["shared"], held["shared_gate"]
        if gate is not None:
            out = out + direct(gate, x_TH).sigmoid() * direct(shared, x_TH)
        elif shared is not None:
            out = shared.fused(x_TH, None, out) if has_no_hooks(shared) else out + direct(shared, x_TH)
        if self.shape.combine == AVERAGE:
            out = out / 2
        out = out if self._combine is None else self._combine(out)
        return (out if held["post"] is None else direct(held["post"], out)).view(x.shape), weights

    def _returned(self, router: nn.Module, x: Tensor, mask: Tensor | None) -> Any:
        """What the router returns, called as the original's is."""
        shape = self.shape.router
        if shape.reads_mask:
            return router(x.reshape(-1, x.shape[-1]), mask)
        if has_listeners(router):
            return router(x if shape.whole_rows or self.routes_texts else x.reshape(-1, x.shape[-1]))
        return router.forward(x if shape.whole_rows else x.reshape(-1, x.shape[-1]))

    def _of_weighed_inputs(self, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Add up what each token's experts make of the token times their weights."""
        x_NH = (x_TH[:, None] * weights_TK[..., None]).flatten(0, 1)
        y_NH = self.experts(x_NH, index_TK.reshape(-1, 1), x_NH.new_ones(len(x_NH), 1))
        return y_NH.unflatten(0, index_TK.shape).sum(dim=1)

    def native(self, to: PartWriter) -> None:
        decline_if(
            {
                "weights multiply the experts' inputs": self.shape.weighs_inputs,
                "ranks share the mixture": self._combine is not None,
                "mixtures of encoders run part by part": to.of_encoder,
            }
        )
        to.put(averages=self.shape.combine == AVERAGE)
        to.put_reals(scale=self.shape.scale)
        to.part("router")
        to.part("experts")
        to.part("shared")
        to.weight("shared_gate", nn.Linear)
        for name in ("norm", "post", "latent_in", "latent_out"):
            to.part(name)
