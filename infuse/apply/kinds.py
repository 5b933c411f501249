"""The table of step kinds: how to build, record, prove and put in each. plan.kinds has the data of each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from infuse.apply import adopt, empty, mismatch, recording
from infuse.apply.build import Making
from infuse.apply.swap import Swaps
from infuse.apply.trial import Trial
from infuse.architectures.foreign.deepspeed import RoutedShape
from infuse.architectures.foreign.plain import EmbeddingShape, LinearShape
from infuse.architectures.foreign.split import SplitShape
from infuse.architectures.layer import LayerShape
from infuse.architectures.module import ModuleShape
from infuse.architectures.parts.experts import ExpertsShape
from infuse.plan.kinds import shape_class
from infuse.plan.step import Step
from infuse.proof.cases import Case

_FEW = 3  # layers recorded in one run; each holds some hundred rows of hidden states in memory
_ALL = 1 << 16  # modules of diffusers have small inputs


@dataclass(frozen=True)
class Work(Making):
    """The work on steps of one kind, besides building modules.

    `cases` records those of up to `at_once` steps; `prove` returns why a step is refused, or None; `put_in` replaces.
    """

    cases: Callable[[Trial, Sequence[Step]], recording.Cases]
    prove: Callable[[Trial, Step, list[Case]], str | None]
    put_in: Callable[[Swaps, Step], None] = Swaps.replace
    at_once: int = 1


WORK: Mapping[type, Work] = MappingProxyType(
    {
        LayerShape: Work(empty.block, adopt.as_block, recording.of_blocks, mismatch.of_layer, at_once=_FEW),
        ModuleShape: Work(empty.module, adopt.as_module, recording.of_modules, mismatch.of_layer, at_once=_ALL),
        SplitShape: Work(
            empty.rank_part, adopt.nothing, recording.of_split_layers, mismatch.of_split_layer, Swaps.split, _FEW
        ),
        LinearShape: Work(empty.linear, adopt.as_part, recording.of_matrices, mismatch.of_called),
        EmbeddingShape: Work(empty.embedding, adopt.as_part, recording.of_matrices, mismatch.of_result),
        ExpertsShape: Work(empty.experts, adopt.as_part, recording.of_experts, mismatch.of_called),
        RoutedShape: Work(empty.experts, adopt.as_part, recording.of_routed, mismatch.of_routed),
        type(None): Work(empty.nothing, adopt.nothing, recording.of_attention, mismatch.of_attention, Swaps.hook),
    }
)


def work_of(step: Step) -> Work:
    return WORK[shape_class(step.shape)]
