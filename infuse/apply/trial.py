"""State shared by the proofs of a plan's steps: the model, the builder, and results of earlier proofs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
    """State of the proofs. `calls`: calls of modules by path, recorded in a step of the model's pipeline.

    `called`: steps of linears and experts, by path, and `callers`: of these. `calls_with_all`: keyword arguments of a
    caller's call, and whether it gives the same with all the new ones in it. `interpretations`: key of a layer that
    keeps its forward → number of the proven interpretation. `structures`: key of a layer's plain step → why it is not
    the original's function, or None. `modules`: proven modules that can be put in.
    """

    plan: Plan
    config: InferenceConfig
    builder: Builder
    calls: Mapping[str, Call] = field(default_factory=dict)
    called: dict[str, Step] = field(default_factory=dict)
    callers: dict[str, Caller] = field(default_factory=dict)
    calls_with_all: list[tuple[dict[str, Any], bool]] = field(default_factory=list)
    interpretations: dict[tuple, int] = field(default_factory=dict)
    structures: dict[tuple, str | None] = field(default_factory=dict)
    modules: list[tuple[Step, nn.Module]] = field(default_factory=list)
    _keys: dict[int, tuple[Step, tuple]] = field(default_factory=dict)  # by id of the step, which is kept alive here
    _numbers: dict[tuple, int] = field(default_factory=dict)  # by likeness, because likenesses are slow to compare

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
