"""DeepSpeed's mixtures, the `MOELayer` in a `deepspeed.moe.layer.MoE`, recognized by their attributes.

DeepSpeed need not be installed. Experts are the user's own modules: running them with small weights tells which linear
is gate, up and down, and which activation they use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from infuse.architectures.foreign.plain import patched
from infuse.architectures.packing import Fill
from infuse.architectures.parts.experts import BoundExperts, ExpertsShape, bind_listed
from infuse.ground.errors import SpecMismatch

_EXPERTS = "experts.deepspeed_experts"


@dataclass(frozen=True)
class RoutedShape(ExpertsShape):
    """Experts with the gate that sends each token to `routes` of `all_experts`."""

    routes: int = 1
    all_experts: int = 1


def is_routed(module: nn.Module) -> bool:
    """Whether the module has the attributes of DeepSpeed's MOELayer."""
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

    `without_drops`: compute every token by its best experts where DeepSpeed would drop tokens or sample experts.
    SpecMismatch lists everything that ours does not support.
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
    bound = None
    try:
        by_path = {f"{_EXPERTS}.{number}": expert for number, expert in enumerate(experts)}
        bound = bind_listed(by_path, gate.wg.in_features)
    except SpecMismatch as mismatch:
        differences += mismatch.differences
    if differences or bound is None:
        raise SpecMismatch(type(module).__name__, differences)
    shape = RoutedShape(**vars(bound.shape), routes=int(gate.k), all_experts=len(experts))
    return BoundExperts(shape, (*bound.fills, Fill("wg", ("gate.wg.weight",))))


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
    """Reasons why a token's result depends on the rest of its batch, or on chance."""
    if getattr(gate, "drop_tokens", True) and gate.eval_capacity_factor * gate.k < gate.wg.out_features:
        yield (
            f"drops tokens beyond a capacity (eval_capacity_factor={gate.eval_capacity_factor}), so that a token's "
            "result depends on its batch"
        )
    if gate.k == 2 and getattr(gate, "top2_2nd_expert_sampling", True):
        yield "samples the second expert"
