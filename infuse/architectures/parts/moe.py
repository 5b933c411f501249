"""Mixtures of experts as feed-forward parts: their declaration in a spec, their binding to a layer, and their shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from infuse.architectures.bind import Binder
from infuse.architectures.packing import Fill
from infuse.architectures.part import INNER, Extent, Matrix, Parameter, PartShape, Share, inside, named
from infuse.architectures.parts.experts import EVERY, MASKS, ExpertsShape, bind_experts
from infuse.architectures.parts.mlp import MLP, GatedMLP, MLPShape, PackedGatedMLP
from infuse.architectures.parts.norm import Norm, NormShape
from infuse.architectures.parts.router import Router, RouterShape
from infuse.ground.errors import SpecMismatch

SHARED_INNER = "inner features of the shared expert"
SUM, AVERAGE = "sum", "average"

AnyMLP = MLP | GatedMLP | PackedGatedMLP


@dataclass(frozen=True)
class MoE:
    """The experts at `experts`, chosen by `router`, plus a `shared` expert that sees every token, if the layer has one.

    `gate`: a linear [1, H] whose sigmoid weighs the shared expert. `dense`: the MLP of layers that have no module at
    `experts`. Attributes of the module around the experts: `scale`, a number that multiplies their sum; `combine`,
    "sum" or "average" of that and the shared expert. `norm`: of the experts' input, which the router sees without it;
    `post`: of the sum of all. `weighs_inputs`: weights multiply the experts' inputs instead of their outputs. `latent`:
    linears before and after the experts, whose inputs and outputs are narrower; layers may have an Identity. `dropout`:
    attribute of the experts, a rate whose complement multiplies what they make in evaluation.
    """

    router: Router
    experts: str = "mlp.experts"
    shared: AnyMLP | None = None
    gate: str | None = None
    dense: AnyMLP | None = None
    scale: str | None = None
    combine: str | None = None
    norm: Norm | None = None
    post: Norm | None = None
    weighs_inputs: bool = False
    latent: tuple[str, str] | None = None
    dropout: str | None = None

    def bind(self, binder: Binder, name: str) -> PartShape:
        if self.dense is not None and binder.module(self.experts, optional=True) is None:
            return self.dense.bind(binder, name)
        router = self.router.bind(binder, f"{name}.router")
        experts = self._bind_experts(binder, f"{name}.experts")
        if experts is None:
            return router
        if router.experts != experts.count:
            binder.differences.append(
                f"{self.router.module} chooses among {router.experts} experts; {self.experts} has {experts.count}"
            )
        shared, gated = None, False
        if self.shared is not None and binder.module(self.shared.down.rpartition(".")[0], optional=True) is not None:
            shared = self.shared.bind(binder, f"{name}.shared")
            if gated := self.gate is not None:
                self._bind_gate(binder, name)
        around = self.experts.rpartition(".")[0]
        scale = 1.0 if self.scale is None else binder.attribute(around, self.scale)
        if self.dropout is not None:
            scale *= 1.0 - self._rate(binder, self.dropout)
        combine = SUM if shared is None or self.combine is None else binder.attribute(around, self.combine)
        if combine not in (SUM, AVERAGE):
            binder.differ(f"{around}.{self.combine} is {combine!r}; only {SUM!r} and {AVERAGE!r} are understood")
        norm, post = (
            None if each is None else each.bind(binder, f"{name}.{target}")
            for target, each in (("norm", self.norm), ("post", self.post))
        )
        latent = self._bind_latent(binder, name)
        return MoEShape(router, experts, shared, gated, scale, combine, norm, post, self.weighs_inputs, latent)

    def _rate(self, binder: Binder, name: str) -> float:
        """The rate of dropout that is this attribute of the experts."""
        rate = binder.attribute(self.experts, name)
        if isinstance(rate, (int, float)) and rate <= 1:
            return max(float(rate), 0.0)
        binder.differ(f"{self.experts}.{name} is {rate!r}, not a rate")
        return 0.0

    def _bind_latent(self, binder: Binder, name: str) -> LatentShape | None:
        if self.latent is None or isinstance(binder.module(self.latent[0], optional=True), nn.Identity):
            return None
        into, out = (binder.linear(path) for path in self.latent)
        if (into.rows, into.columns) != (out.columns, out.rows):
            sizes = [(linear.rows, linear.columns) for linear in (into, out)]
            binder.differ(f"{' and '.join(self.latent)} are matrices of {sizes}")
        for target, path, linear in zip(("latent_in", "latent_out"), self.latent, (into, out), strict=True):
            binder.fill_linear(named(name, target), (path,), linear.bias)
        return LatentShape(into.columns, into.rows, into.bias, out.bias)

    def _bind_experts(self, binder: Binder, name: str) -> ExpertsShape | None:
        """Bind the experts; None, with the differences noted, if they are not understood."""
        module, around = binder.module(self.experts), binder.module(self.experts.rpartition(".")[0])
        if module is None or around is None:
            return None
        try:
            bound = bind_experts(module, around, by_mask=self.router.calls == MASKS)
        except SpecMismatch as mismatch:
            binder.differences += [f"{self.experts}: {text}" for text in mismatch.differences]
            return None
        if bound.shape.call != (EVERY if self.weighs_inputs else self.router.calls):
            binder.differ(f"{self.experts} is called {bound.shape.call}")
            return None
        for fill in bound.fills:
            sources = tuple(named(self.experts, source) for source in fill.sources)
            for source in sources:
                binder.claim(source)
            binder.fills.append(replace(fill, target=named(name, fill.target), sources=sources))
        return bound.shape

    def _bind_gate(self, binder: Binder, name: str) -> None:
        assert self.gate is not None
        linear = binder.linear(self.gate)
        if linear.rows != 1 or linear.bias:
            bias = "with a bias" if linear.bias else "without bias"
            binder.differences.append(f"{self.gate} has {linear.rows} outputs {bias}; only one without is understood")
        binder.fills.append(Fill(f"{name}.shared_gate.weight", (f"{self.gate}.weight",), binder.transposed))


@dataclass(frozen=True)
class LatentShape:
    """Linears before and after experts that are `width` wide. Ranks hold both, and add up what the second makes."""

    hidden: int
    width: int
    in_bias: bool
    out_bias: bool

    @property
    def matrices(self) -> tuple[Matrix, Matrix]:
        return (
            Matrix("latent_in", self.width, self.hidden, self.in_bias),
            Matrix("latent_out", self.hidden, self.width, self.out_bias),
        )


@dataclass(frozen=True)
class MoEShape(PartShape):
    """Dimensions and contents of one mixture. Ranks hold the router and the shared expert's gate whole."""

    router: RouterShape
    experts: ExpertsShape
    shared: MLPShape | None
    gated: bool
    scale: float = 1.0
    combine: str = SUM
    norm: NormShape | None = None
    post: NormShape | None = None
    weighs_inputs: bool = False
    latent: LatentShape | None = None

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        shared = () if self.shared is None else self.shared.matrices
        return (
            *(inside("experts", matrix) for matrix in self.experts.matrices),
            *(replace(inside("shared", matrix), extents=_own(matrix.extents)) for matrix in shared),
            *(() if self.latent is None else self.latent.matrices),
        )

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        shared = () if self.shared is None else self.shared.parameters
        return (
            *(inside("router", parameter) for parameter in self.router.parameters),
            *(inside("experts", parameter) for parameter in self.experts.parameters),
            *(replace(inside("shared", parameter), extents=_own(parameter.extents)) for parameter in shared),
            *((Parameter("shared_gate.weight"),) if self.gated else ()),
            *(() if self.latent is None else (p for matrix in self.latent.matrices for p in matrix.parameters)),
            *(inside(name, parameter) for name, norm in self.norms.items() for parameter in norm.parameters),
        )

    @property
    def norms(self) -> dict[str, NormShape]:
        """The norms that there are, by name."""
        return {name: norm for name, norm in (("norm", self.norm), ("post", self.post)) if norm is not None}

    @property
    def ops(self) -> tuple[str, ...]:
        parts = (self.router, self.experts, *((self.shared,) if self.shared else ()), *self.norms.values())
        return tuple(name for part in parts for name in part.ops)

    @property
    def recorded(self) -> Mapping[str, str]:
        return {"router": self.router.rule.module}

    @property
    def whole_rows(self) -> bool:  # type: ignore[override]
        return self.router.whole_rows

    def of_rank(self, share: Share) -> MoEShape:
        shared = self.shared
        if shared is not None:
            shared = shared.of_rank(Share(share.rank, {INNER: share.ranges[SHARED_INNER]}))
        latent = self.latent
        if latent is not None and latent.out_bias:
            raise SpecMismatch("its experts", ["the linear after them has a bias, which each rank would add"])
        return replace(self, experts=self.experts.of_rank(share), shared=shared)


def _own(extents: tuple[Extent, ...]) -> tuple[Extent, ...]:
    """The shared expert's extents in their own unit: ranks split its width independently of the experts'."""
    return tuple(replace(extent, unit=SHARED_INNER) for extent in extents)
