"""DeepSpeed's own mixtures, the `MOELayer` in a `deepspeed.moe.layer.MoE`: recognized by what they hold.

DeepSpeed need not be there. Experts are the user's own modules: which of their linears is which, and the activation,
are found by comparing what small weights give.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from infuse.activations import ACTIVATIONS, ExpertGate
from infuse.architectures.experts import BoundExperts, ExpertsShape
from infuse.architectures.packing import Fill
from infuse.architectures.plain import LinearShape, linears, patched
from infuse.errors import SpecMismatch, in_brief

_EXPERTS = "experts.deepspeed_experts"
_TOKENS, _HIDDEN, _INNER = 6, 5, 7  # of the small weights
_TOLERANCE = 1e-9  # of the largest value, in float64; different activations differ by 1e-4


@dataclass(frozen=True)
class RoutedShape(ExpertsShape):
    """Experts with the gate that sends each token to `routes` of `all_experts`."""

    routes: int = 1
    all_experts: int = 1


def is_routed(module: nn.Module) -> bool:
    """Whether the module holds what DeepSpeed's MOELayer holds."""
    gate, experts = getattr(module, "gate", None), getattr(module, "experts", None)
    listed = isinstance(getattr(experts, "deepspeed_experts", None), nn.ModuleList)
    return listed and isinstance(getattr(gate, "wg", None), nn.Linear)


def routed_in(module: nn.Module, path: str = "") -> Iterator[str]:
    """Paths, from the root, of such mixtures in `module`, whose own path is `path`."""
    for name, child in module.named_modules():
        if is_routed(child):
            yield ".".join(part for part in (path, name) if part)


def bind_routed(module: Any, *, without_drops: bool) -> BoundExperts:
    """Read the gate and the experts of a mixture, live or on meta.

    `without_drops`: every token is computed by the experts that it prefers, where DeepSpeed would drop or sample.
    SpecMismatch lists everything that ours does not do.
    """
    gate, experts = module.gate, list(module.experts.deepspeed_experts)
    reasons = [] if without_drops else [*_depends_on_batch(gate)]
    differences = [f"it {' and '.join(reasons)}; moe.without_drops=True computes every token"] if reasons else []
    if patched(module):
        differences.append("it has a forward set on the instance")
    if gate.wg.bias is not None:
        differences.append("its gate has a bias")
    if gate.wg.out_features != len(experts):
        differences.append(
            f"it holds {len(experts)} of {gate.wg.out_features} experts; build it with ep_size=1 and give ep_size to "
            "init_inference"
        )
    roles: tuple[ExpertGate, tuple[str, ...]] | str = (
        _roles(experts[0], gate.wg.in_features) if experts else "it has no experts"
    )
    if isinstance(roles, str):
        differences.append(roles)
    elif any(_held(expert) != _held(experts[0]) for expert in experts):
        differences.append("its experts have different parameters")
    if differences or isinstance(roles, str):
        raise SpecMismatch(type(module).__name__, differences)
    (chosen, names), shapes = roles, dict(linears(experts[0]))
    *ups, down = names
    up_bias, down_bias = shapes[ups[0]].bias, shapes[down].bias
    count, hidden, inner = len(experts), shapes[down].outputs, shapes[down].inputs
    shape = RoutedShape(count, hidden, inner, chosen, up_bias, down_bias, routes=int(gate.k), all_experts=count)
    fills = []
    for target, of, biased in (("up", ups, up_bias), ("down", [down], down_bias)):
        for leaf in ("weight", "bias") if biased else ("weight",):
            sources = (f"{_EXPERTS}.{number}.{name}.{leaf}" for number in range(len(experts)) for name in of)
            fills.append(Fill(f"{target}.{leaf}", tuple(sources)))
    return BoundExperts(shape, (*fills, Fill("wg", ("gate.wg.weight",))))


@contextmanager
def without_drops(module: Any) -> Iterator[None]:
    """Context in which the gate of a mixture neither drops tokens nor samples experts."""
    before = vars(module.gate).copy()
    module.gate.drop_tokens = module.gate.top2_2nd_expert_sampling = False
    try:
        yield
    finally:
        vars(module.gate).clear()
        vars(module.gate).update(before)


def _depends_on_batch(gate: Any) -> Iterator[str]:
    """What makes a token's result depend on the others of its batch, or on chance."""
    if getattr(gate, "drop_tokens", True) and gate.eval_capacity_factor * gate.k < gate.wg.out_features:
        yield (
            f"drops tokens beyond a capacity (eval_capacity_factor={gate.eval_capacity_factor}), so that a token's "
            "result depends on its batch"
        )
    if gate.k == 2 and getattr(gate, "top2_2nd_expert_sampling", True):
        yield "samples the second expert"


def _held(expert: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in expert.named_parameters()}


def _roles(expert: nn.Module, hidden: int) -> tuple[ExpertGate, tuple[str, ...]] | str:
    """The gate of an expert and its linears, [gate,] up, down, by which ours gives what it gives; or a reason."""
    found = dict(linears(expert))
    in_linears = {f"{name}.{leaf}" for name in found for leaf in ("weight", "bias")}
    others = [name for name, _ in expert.named_parameters() if name not in in_linears]
    if others or len(found) not in (2, 3) or any(shape.transposed for shape in found.values()):
        return f"an expert has {', '.join(others or found) or 'no linears'}; only two or three linears are understood"
    fitting = [names for names in permutations(found) if _fits([found[name] for name in names], hidden)]
    was_training = [module for module in expert.modules() if module.training]
    expert.eval()
    reason = "an expert is none of ours: down(act(up(x))) or down(act(gate(x)) * up(x))"
    try:
        for names in fitting:
            try:
                gate = _alike(expert, found, names)
            except Exception as error:  # the module is the user's; our weights are not what it computes with
                reason = f"an expert cannot be tried: {in_brief(error)}"
                continue
            if gate is not None:
                return gate, names
    finally:
        for module in was_training:
            module.training = True
    return reason


def _fits(shapes: list[LinearShape], hidden: int) -> bool:
    """Whether linears of these shapes can be [gate,] up, down."""
    *ups, down = shapes
    same = {(up.inputs, up.outputs, up.bias) for up in ups}
    return down.outputs == hidden and same == {(hidden, down.inputs, ups[0].bias)}


def _alike(expert: nn.Module, shapes: dict[str, LinearShape], names: tuple[str, ...]) -> ExpertGate | None:
    """The gate with which the linears `names` give what the expert gives, on small weights; None if none does."""
    generator = torch.Generator().manual_seed(0)

    def made(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    x, held = made(1, 1, _TOKENS, _HIDDEN), dict[str, Tensor]()
    for name in names:
        outputs, inputs = (_HIDDEN, _INNER) if name == names[-1] else (_INNER, _HIDDEN)
        held[f"{name}.weight"] = made(outputs, inputs)
        if shapes[name].bias:
            held[f"{name}.bias"] = made(outputs)
    with torch.no_grad(), torch.device("cpu"):
        given: Any = torch.func.functional_call(expert, held, (x,))
        wanted = given[0] if isinstance(given, tuple) else given
        inner = torch.cat([_product(held, name, x) for name in names[:-1]], dim=-1)
        for activation in dict.fromkeys(ACTIVATIONS.values()):
            gate = ExpertGate(activation, gated=len(names) == 3)
            found = _product(held, names[-1], gate.inner(inner))
            if wanted.shape == found.shape and (found - wanted).abs().max() <= _TOLERANCE * wanted.abs().max():
                return gate
    return None


def _product(held: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return nn.functional.linear(x, held[f"{name}.weight"], held.get(f"{name}.bias"))
