"""Prove layers without a spec that ranks split, by trying each interpretation in place, on all ranks in step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from infuse.apply.build import Builder
from infuse.architectures.foreign.split import SplitShape
from infuse.ground.dtype_cast import in_dtype
from infuse.parallel.group import LOCAL, Group
from infuse.plan.step import Step
from infuse.proof import compare
from infuse.proof.cases import Case
from infuse.unknown.install import put_part
from infuse.weights.undo import put


def proven(step: Step, cases: list[Case], builder: Builder) -> tuple[int, str | None]:
    """Return the number of the matching interpretation (0: the step itself), or the reason if none matches.

    The result is the same on every rank. Each rank first runs alone, without sums, so that an exception occurs before
    ranks wait for each other.
    """
    trial = _Trial(builder.source.model.get_submodule(step.path), cases, builder)

    def agreed(look: Callable[[], str | None]) -> str | None:
        return builder.group.any_fault(compare.attempted(look), f"the proof of {step.path}")

    if mismatch := agreed(trial.expect):
        return 0, mismatch
    first = None
    for number, interpretation in enumerate((step, *step.others)):
        plain = interpretation.plain
        run_alone, structure = partial(trial.run_alone, plain), partial(trial.structure, plain)
        looks = (run_alone, structure, partial(trial.result, interpretation))
        mismatch = next((reason for look in looks if (reason := agreed(look))), None)
        if mismatch is None:
            return number, None
        first = first or mismatch
    more = f" (and so do {len(step.others)} other interpretations of it)" if step.others else ""
    return 0, f"{first}{more}"


@contextmanager
def _held_in_float32(layer: nn.Module) -> Iterator[None]:
    """Hold all weights of the layer in float32 instead of casting as they run: T5 rounds to its weight's dtype."""
    kept = {parameter: parameter.data for parameter in layer.parameters() if parameter.is_floating_point()}
    try:
        for parameter, data in kept.items():
            parameter.data = data.float()
        yield
    finally:
        for parameter, data in kept.items():
            parameter.data = data


@dataclass
class _Trial:
    """A layer, the cases to try its interpretations on, and the expected outputs."""

    layer: nn.Module
    cases: list[Case]
    builder: Builder
    wanted: compare.Expected = field(init=False)

    def expect(self) -> None:
        with _held_in_float32(self.layer):
            self.wanted = compare.expected(self.layer, self.cases, self.builder.dtype)

    def run_alone(self, step: Step) -> None:
        with self._standing_in(step, torch.float32, LOCAL), in_dtype(self.layer, torch.float32):
            for case in self.cases:
                compare.outputs(self.layer, case, torch.float32, case.caches[0])

    def structure(self, step: Step) -> str | None:
        with self._standing_in(step, torch.float32, self.builder.group):
            return compare.structure_mismatch(self.layer, self.cases, self.wanted)

    def result(self, step: Step) -> str | None:
        dtype = self.builder.dtype
        with self._standing_in(step, dtype, self.builder.group), in_dtype(self.layer, dtype):
            return compare.result_mismatch(self.layer, step, self.cases, self.wanted, dtype)

    @contextmanager
    def _standing_in(self, step: Step, dtype: torch.dtype, group: Group) -> Iterator[None]:
        """Context in which the layer runs as this rank's part of itself."""
        assert isinstance(step.shape, SplitShape)
        part = replace(self.builder, group=group).built(step, dtype)
        with ExitStack() as undo:
            put_part(self.layer, step.shape, part, partial(put, undo), group.dense, step.path)
            yield


def together(steps: Sequence[tuple[Step, tuple]], refused: Mapping[tuple, str]) -> dict[tuple, str]:
    """Map keys to reasons for layers that are refused because another layer of their class was.

    The first layer of such a class computes the head biases for the following ones.
    """
    classes = {step.layer for step, _ in steps if isinstance(step.shape, SplitShape) and step.shape.tables}
    fallen = {step.layer: step.path for step, key in steps if key in refused and step.layer in classes}
    return {
        key: f"{fallen[step.layer]}, with which it shares the biases of its heads, was refused"
        for step, key in steps
        if step.layer in fallen and key not in refused
    }
