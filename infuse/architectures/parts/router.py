"""Routers of mixtures: how a token's experts are chosen and weighed. Data only; ops/router.py computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from infuse.architectures.bind import Binder
from infuse.architectures.packing import Fill
from infuse.architectures.part import Parameter, PartShape, inside, named
from infuse.architectures.parts.experts import MASKS, ONE_HOT, ROUTES
from infuse.architectures.parts.norm import RMS, Norm, NormShape
from infuse.ground.routing import ROUNDED, SCORE, SOFTMAX, TOP2_SUM, Routing


@dataclass(frozen=True)
class Groups:
    """Experts in groups of equal size; only the `kept` groups that rank best `by` their scores may be chosen from.

    `count` and `kept` are attributes of the router. `fill` is the score of experts in the other groups.
    """

    by: str = TOP2_SUM
    fill: float = float("-inf")
    count: str = "num_group"
    kept: str = "topk_group"


@dataclass(frozen=True)
class Router:
    """The router at `module`, whose parameter `weight` [E, H] gives the logits. transformers records them by its class.

    `correction`: path of a bias [E] that is added to the scores before experts are chosen. `top_k`, `normalise`,
    `least`, `scale`, `cap` and `jitter` name attributes of the module. All other words are those of Routing. `calls`:
    how the experts that it chooses must be called (architectures/parts/experts.py).
    """

    calls: ClassVar[str] = ROUTES

    module: str
    weight: str = "weight"
    bias: str = "bias"
    logits: str = ROUNDED
    score: str | None = SOFTMAX
    rounded_score: bool = False
    correction: str | None = None
    groups: Groups | None = None
    weights: str = SCORE
    normalise: bool | str = False
    eps: float = 0.0
    least: str | None = None
    scale: str | None = None
    cast: str | None = None
    in_order: bool = True
    top_k: str | None = "top_k"
    cap: str | None = None
    jitter: str | None = None

    def bind(self, binder: Binder, name: str) -> RouterShape:
        """Bind the router to the layer; `name` is its name in the new module."""
        weight, bias = named(self.module, self.weight), named(self.module, self.bias)
        experts, hidden = self._matrix(binder, weight)
        binder.fills.append(Fill(f"{name}.weight", (weight,)))
        if has_bias := bias in binder.parameters:
            binder.claim(bias)
            binder.fills.append(Fill(f"{name}.bias", (bias,)))
        correction, is_parameter = self._correction(binder, name, experts)
        return RouterShape(
            rule=self,
            hidden=hidden,
            experts=experts,
            top_k=int(self._number(binder, self.top_k, 1)),
            bias=has_bias,
            correction=correction,
            correction_is_parameter=is_parameter,
            groups=self._groups(binder, experts),
            normalise=self._normalises(binder),
            least=self._number(binder, self.least, 0.0),
            scale=self._number(binder, self.scale, 1.0),
            cap=self._number(binder, self.cap, 0.0),
            jitter=self._number(binder, self.jitter, 0.0),
        )

    def _matrix(self, binder: Binder, name: str) -> tuple[int, int]:
        if name not in binder.parameters:
            binder.differences.append(f"there is no parameter {name}")
            return 1, 1
        rows, columns = binder.claim(name).shape
        return rows, columns

    def _correction(self, binder: Binder, name: str, experts: int) -> tuple[tuple[int, ...], bool]:
        """Shape of the correction, () without one, and whether it is a parameter."""
        if self.correction is None:
            return (), False
        path, _, leaf = self.correction.rpartition(".")
        correction: Any = getattr(binder.module(path, optional=True), leaf, None)
        if correction is None:  # LFM2's config can turn it off
            return (), False
        if correction.numel() != experts:
            shape = tuple(correction.shape)
            binder.differences.append(f"{self.correction} has shape {shape}; there are {experts} experts")
        is_parameter = self.correction in binder.parameters
        if is_parameter:
            binder.claim(self.correction)
        binder.fills.append(Fill(f"{name}.correction", (self.correction,)))
        return tuple(correction.shape), is_parameter

    def _groups(self, binder: Binder, experts: int) -> tuple[int, int]:
        """Number of groups and how many of them are kept; (1, 1) if all experts may be chosen."""
        if self.groups is None or binder.attribute(self.module, self.groups.count) is None:
            return 1, 1
        count, kept = (int(self._number(binder, name, 1)) for name in (self.groups.count, self.groups.kept))
        if experts % count:
            binder.differences.append(f"{count} groups do not divide the {experts} experts of {self.module}")
        return count, kept

    def _normalises(self, binder: Binder) -> bool:
        if isinstance(self.normalise, bool):
            return self.normalise
        return bool(binder.attribute(self.module, self.normalise))

    def _number(self, binder: Binder, name: str | None, default: float) -> float:
        if name is None:
            return default
        number = binder.attribute(self.module, name)
        if isinstance(number, (int, float)):
            return number
        if number is not None:
            binder.differences.append(f"{self.module}.{name} is {number!r}, not a number")
        return default


@dataclass(frozen=True)
class RouterShape(PartShape):
    """A router bound to a layer: its `rule` and the numbers that the layer gives.

    `groups` are their number and how many are kept. Every rank holds the router whole, without a quantization format.
    `reads_mask`: it is given the layer's mask, too.
    """

    reads_mask: ClassVar[bool] = False

    rule: Router
    hidden: int
    experts: int
    top_k: int
    bias: bool
    correction: tuple[int, ...]
    correction_is_parameter: bool
    groups: tuple[int, int]
    normalise: bool
    least: float
    scale: float
    cap: float
    jitter: float

    @property
    def routing(self) -> Routing:
        """The arguments of the op."""
        rule = self.rule
        groups = rule.groups or Groups()
        return Routing(
            self.top_k, rule.logits, rule.score, rule.rounded_score, rule.weights, self.normalise, rule.eps, self.least,
            self.scale, rule.cast, rule.in_order, *self.groups, groups.by, groups.fill, self.cap, self.jitter,
        )  # fmt: skip

    @property
    def ops(self) -> tuple[str, ...]:
        return ("router",)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        present = {"weight": True, "bias": self.bias, "correction": self.correction_is_parameter}
        return tuple(Parameter(name) for name, is_present in present.items() if is_present)


@dataclass(frozen=True)
class NormedRouter(Router):
    """A router that normalises its input, multiplies it by the vector at `gain` [H] and by the attribute `factor`.

    An expert's weight is multiplied by its number in `gains` [E]. transformers records the softmax of the logits.
    `norm`, `gain`, `gains` are paths in the module.
    """

    norm: str = "norm"
    gain: str = "scale"
    gains: str = "per_expert_scale"
    factor: str = "scalar_root_size"

    def bind(self, binder: Binder, name: str) -> NormedRouterShape:
        bound = super().bind(binder, name)
        norm = Norm(named(self.module, self.norm), RMS).bind(binder, f"{name}.norm")
        for target, path, size in (("gain", self.gain, bound.hidden), ("gains", self.gains, bound.experts)):
            binder.fill_parameter(f"{name}.{target}", named(self.module, path), (size,))
        return NormedRouterShape(
            **vars(bound),
            norm=norm or NormShape(RMS, bound.hidden, 0.0, 0.0, None, False),
            factor=self._number(binder, self.factor, 1.0),
        )


@dataclass(frozen=True)
class NormedRouterShape(RouterShape):
    """A bound NormedRouter."""

    norm: NormShape
    factor: float

    @property
    def ops(self) -> tuple[str, ...]:
        return (*super().ops, *self.norm.ops)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        of_norm = (inside("norm", parameter) for parameter in self.norm.parameters)
        return (*super().parameters, *of_norm, Parameter("gain"), Parameter("gains"))


@dataclass(frozen=True)
class ScoringRouter(Router):
    """A router that returns the scores of all experts, zeros where they are not chosen, and the logits, [T, E] each.

    It chooses by the rule, which leaves the logits as they are; a score is the sigmoid of a chosen one.
    """

    def bind(self, binder: Binder, name: str) -> ScoringRouterShape:
        bound = super().bind(binder, name)
        return ScoringRouterShape(**vars(bound))


@dataclass(frozen=True)
class ScoringRouterShape(RouterShape):
    """A bound ScoringRouter."""


@dataclass(frozen=True)
class Top1Router(Router):
    """A router that chooses one expert for each token of a row [B, T], up to a number of tokens an expert and row.

    Switch Transformers (Fedus et al. 2021). Later tokens of the row that choose a full expert get none. `capacity` and
    `dtype` name attributes of the module: that number, and the dtype of the product and of the softmax.
    """

    calls: ClassVar[str] = ONE_HOT

    weight: str = "classifier.weight"
    bias: str = "classifier.bias"
    top_k: str | None = None
    capacity: str = "expert_capacity"
    dtype: str = "dtype"

    def bind(self, binder: Binder, name: str) -> Top1RouterShape:
        return Top1RouterShape(
            **vars(super().bind(binder, name)),
            capacity=int(self._number(binder, self.capacity, 1)),
            dtype=self._dtype(binder),
        )

    def _dtype(self, binder: Binder) -> str:
        found = binder.attribute(self.module, self.dtype)
        if not isinstance(found, torch.dtype):
            binder.differ(f"{self.module}.{self.dtype} is {found!r}, not a dtype")
        return str(found).removeprefix("torch.")


@dataclass(frozen=True)
class Top1RouterShape(RouterShape):
    """A bound Top1Router, with the name of its `dtype`. What a token gets depends on those before it."""

    whole_rows: ClassVar[bool] = True

    capacity: int
    dtype: str

    @property
    def ops(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class Top2Router(Top1Router):
    """A router that chooses two experts for each token, up to a number of tokens an expert and call.

    NLLB-MoE in evaluation. The capacity is a `fraction` of the tokens or, if that is not positive, `capacity`; first
    choices come before second ones, and tokens `by_priority` come in the order of their best probability. Both weights
    are divided by their sum, before (`normalises_first`) or after experts drop tokens. Padding gets no expert, unless
    `ignores_padding`. All these name attributes of the module.
    """

    calls: ClassVar[str] = MASKS

    fraction: str = "moe_eval_capacity_token_fraction"
    policy: str = "second_expert_policy"
    by_priority: str = "batch_prioritized_routing"
    normalises_first: str = "normalize_router_prob_before_dropping"
    ignores_padding: str = "router_ignore_padding_tokens"

    def bind(self, binder: Binder, name: str) -> Top2RouterShape:
        policy = binder.attribute(self.module, self.policy)
        if policy in ("sampling", "random"):
            binder.differ(f"{self.module}.{self.policy} is {policy!r}: its second experts are drawn by lot")
        fraction = float(self._number(binder, self.fraction, 0.0))
        if fraction <= 0 and binder.attribute(self.module, self.capacity) is None:
            binder.differ(f"{self.module}.{self.capacity} is None: the first call's number of tokens would decide it")
        bound = super().bind(binder, name)
        if bound.experts < 2:
            binder.differ(f"{self.module} has {bound.experts} experts to choose two from")

        def flag(name: str) -> bool:
            return bool(binder.attribute(self.module, name))

        return Top2RouterShape(
            **{**vars(bound), "top_k": 2},
            fraction=fraction,
            by_priority=flag(self.by_priority),
            normalises_first=flag(self.normalises_first),
            ignores_padding=flag(self.ignores_padding),
        )


@dataclass(frozen=True)
class Top2RouterShape(Top1RouterShape):
    """A bound Top2Router."""

    reads_mask: ClassVar[bool] = True

    fraction: float
    by_priority: bool
    normalises_first: bool
    ignores_padding: bool
