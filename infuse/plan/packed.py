"""Find new tensors that differ from the original's. Our shards store and read them as they are."""

from __future__ import annotations

from infuse.architectures.packing import Fill
from infuse.plan.step import Step


def packed_paths(step: Step) -> tuple[str, ...]:
    """Paths of a step's new modules whose tensors differ from the original's."""
    if step.keeps_forward:
        return tuple(f"{step.path}.{matrix.target}" for fill, matrix in step.made if fill.format)
    return (step.path,) if step.kind.is_packed or step.formats else ()


def packed_fill(step: Step, fill: Fill) -> bool:
    """True if the target of this fill of the step is in one of its `packed_paths`."""
    return f"{step.path}.{fill.target}".startswith(tuple(f"{path}." for path in packed_paths(step)))
