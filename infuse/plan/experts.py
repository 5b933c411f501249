"""A model's experts: check their number against the config, choose formats, describe how ranks share them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from infuse.architectures.foreign.deepspeed import routed_in
from infuse.architectures.layer import LayerShape
from infuse.architectures.part import PartShape
from infuse.architectures.parts.experts import BoundExperts, experts_in
from infuse.config.inference import InferenceConfig
from infuse.ground.errors import ConfigError
from infuse.parallel.mesh import Mesh
from infuse.plan.formats import Formats, linears_of, matrices_made
from infuse.plan.found import grouped
from infuse.plan.step import Step
from infuse.quant.format import QuantFormat


def check_counts(model: nn.Module, config: InferenceConfig) -> None:
    """Raise ConfigError if `moe_experts` does not match the model: one number for all layers, or one per layer."""
    asked = config.expert_counts
    counts = {path: int(getattr(model.get_submodule(path), "num_experts", 0)) for path in experts_in(model)}
    counts |= {path: len(model.get_parameter(f"{path}.gate.wg.weight")) for path in routed_in(model)}
    experts = tuple(counts.values())
    if not asked or asked == experts or set(experts) == set(asked):
        return
    key = f"moe.moe_experts: found {asked[0] if len(asked) == 1 else list(asked)}"
    if not experts:
        raise ConfigError(f"{key}; {type(model).__name__} has no experts that infuse knows: leave it out")
    rows = grouped([(path, str(count)) for path, count in counts.items()], path_column=0)
    there = "; ".join(f"{count} in {path}" for path, count in rows)
    raise ConfigError(f"{key}; {type(model).__name__} has {there}: give these numbers, or leave it out")


def idle_ranks(mesh: Mesh, steps: Iterable[Step]) -> list[str]:
    """Return a note if ep_size > 1 but no experts are shared."""
    wholes = [step.whole for step in steps if isinstance(step.whole, (PartShape, LayerShape))]
    if mesh.ep == 1 or any(whole.expert_count for whole in wholes):
        return []
    return [f"moe.ep_size={mesh.ep}: no effect: the model has no experts that ranks can share"]


def share_text(counts: Sequence[int], slices: int) -> str:
    """Describe how ranks share experts: `counts` per rank, each expert in `slices`."""
    each = str(counts[0]) if len(set(counts)) == 1 else " or ".join(str(count) for count in sorted(set(counts)))
    text = f"{each} of {sum(counts)} experts on a rank" if len(counts) > 1 else "each expert"
    return f"{text} in {slices} slices" if slices > 1 else text


def formats_of_experts(bound: BoundExperts, formats: Formats, path: str) -> tuple[dict[str, QuantFormat], str]:
    """Weight → format of the experts at `path`, of both matrices or of none; if none, why, unless none was asked."""
    made = matrices_made(bound.fills, bound.shape)
    asked = {matrix.weight: formats.of_fill(fill, path) for fill, matrix in made}
    if any(formats.is_ordered(fill, path) for fill, _ in made):
        return {}, "stored in act-order, and experts take no inputs in another order"
    if found := {weight: format for weight, format in asked.items() if format is not None}:
        if len(found) == len(asked):
            return found, ""
        told = " and ".join(f"{matrix.target} in {asked[matrix.weight] or 'none'}" for _, matrix in made)
        return {}, f"{told}: both need a format"
    for fill, _ in made:
        if differing := formats.difference(fill, path):
            return {}, differing
    alone = formats.left_alone(linears_of(bound.fills[0], path)[0])
    return {}, "quant.weight.post_init_quant leaves it alone" if alone else ""
