"""What the proofs of a plan's steps share: the model, the builder, and what one proof leaves for the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from infuse.apply.build import Builder
from infuse.config.inference import InferenceConfig
from infuse.plan.found import traits
from infuse.plan.plan import Plan
from infuse.plan.step import Step
from infuse.proof.cases import Call
from infuse.proof.in_place import Caller


@dataclass
class Trial:
    """`calls` of modules, by path, were recorded in a step of the model's pipeline.

    `callers` are those of linears and experts, by path. `interpretations`: key of a layer that keeps its forward →
    number of the one that was proven. `modules` were proven and can be put in.
    """

    plan: Plan
    config: InferenceConfig
    builder: Builder
    calls: Mapping[str, Call] = field(default_factory=dict)
    callers: dict[str, Caller] = field(default_factory=dict)
    interpretations: dict[tuple, int] = field(default_factory=dict)
    modules: list[tuple[Step, nn.Module]] = field(default_factory=list)
    _keys: dict[int, tuple[Step, tuple]] = field(default_factory=dict)  # by id of the step, which is held with it
    _numbers: dict[tuple, int] = field(default_factory=dict)  # of likenesses, as these take long to compare

    @property
    def model(self) -> nn.Module:
        return self.builder.source.model

    def key(self, step: Step) -> tuple:
        """Key of a step: steps with equal keys replace modules of one kind alike and get the same verdict."""
        if self.config.verify == "all":
            return (step.path, step.depth)
        if id(step) not in self._keys:
            likeness = (step.likeness, *traits(self.model, step.path, is_called=step.is_called))
            self._keys[id(step)] = step, (self._numbers.setdefault(likeness, len(self._numbers)),)
        return self._keys[id(step)][1]
