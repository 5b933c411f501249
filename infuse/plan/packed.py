"""Find new tensors that differ from the original's. Our shards store and read them as they are."""

from __future__ import annotations

from collections.abc import Iterable

from infuse.architectures.layer import LayerShape
from infuse.architectures.packing import Fill
from infuse.plan.step import Step
from infuse.weights.pieces import Packed, packed_qkv


def packed_paths(step: Step) -> tuple[str, ...]:
    """Paths of a step's new modules whose tensors differ from the original's."""
    if step.keeps_forward:
        return tuple(f"{step.path}.{matrix.target}" for fill, matrix in step.made if fill.format)
    return (step.path,) if step.kind.is_packed or step.formats else ()


def packings(steps: Iterable[Step]) -> dict[str, Packed]:
    """Packed matrices (q, k and v; gate and up) of the layers that `steps` replace, by their names in the model."""
    packed: dict[str, Packed] = {}
    for step in steps:
        shape = step.whole or step.shape
        if not isinstance(shape, LayerShape):
            continue
        lying = {parameter.target: parameter.extents for parameter in shape.parameters}
        for fill in step.fills:
            extents, name = lying.get(fill.target, ()), f"{step.path}.{fill.sources[0]}"
            if fill.absent:
                continue
            if fill.heads is not None:
                if layout := packed_qkv(fill.packing, fill.heads):
                    packed[name] = layout
            elif len(fill.sources) == 1 and len(extents) > 1:
                packed[name] = Packed(tuple(extent.length for extent in extents))
    return packed


def packed_fill(step: Step, fill: Fill) -> bool:
    """True if the target of this fill of the step is in one of its `packed_paths`."""
    return f"{step.path}.{fill.target}".startswith(tuple(f"{path}." for path in packed_paths(step)))
