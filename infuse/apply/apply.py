"""Execute a plan: prove its steps, then, for each accepted one, build on meta → fill → swap → drop the old.

Peak memory is the model plus the merged matrices of one layer. A step that fails its proof is not swapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from uuid import uuid4

import torch
from torch import nn

from infuse.apply.build import Builder
from infuse.apply.kinds import work_of
from infuse.apply.prove import Proofs, Verdict
from infuse.apply.restore import BEFORE, Before
from infuse.apply.swap import Swaps
from infuse.apply.trial import Trial
from infuse.architectures.foreign.quantized_elsewhere import quantized_by
from infuse.cache.slot import Filler
from infuse.config.inference import InferenceConfig
from infuse.ground import memory
from infuse.ground.dtype_cast import cast_buffers, parameters_to_cast
from infuse.ground.errors import InfuseError, in_brief
from infuse.ground.lookups import lookups_in_range
from infuse.layers.mixer import Mixer
from infuse.parallel.group import LOCAL, Group
from infuse.plan.bytes import parameter_bytes
from infuse.plan.plan import Plan
from infuse.plan.shared import Sharing
from infuse.plan.step import Step
from infuse.proof.cases import Call
from infuse.weights.alike import agree_on_weights, live_sums
from infuse.weights.loader import LayerSource, Rehearsal
from infuse.weights.skeleton import Tensors

Progress = Callable[[int, int, str], None]  # done, total, description


@dataclass(frozen=True)
class Proven:
    """A plan with proven steps; `carry_out` makes the replacements in the source's model.

    `modules`: proven modules built from a checkpoint, reused so that their tensors are not built twice.
    """

    plan: Plan
    source: LayerSource
    builder: Builder
    verdict: Verdict
    modules: list[tuple[Step, nn.Module]]

    @property
    def accepted(self) -> list[Step]:
        return self.verdict.accepted

    @property
    def model(self) -> nn.Module:
        return self.source.model

    @torch.no_grad()
    def carry_out(self, progress: Progress | None = None) -> Plan:
        """Return the plan as executed, with refused steps among `left`."""
        model, source, dtype = self.model, self.source, self.plan.dtype
        sharing = Sharing(model, self.accepted)
        rehearsed = self._rehearse(sharing) if source.is_live else {}
        before = Tensors(model)
        swaps = Swaps(self.builder, self.accepted, sharing, self.modules, rehearsed, before)
        self.modules.clear()
        for done, step in enumerate(self.accepted):
            source.step()
            try:
                work_of(step).put_in(swaps, step)
            except Exception as error:  # out of memory, where nothing else is left to raise
                if source.is_live and done:
                    raise InfuseError(_half_done(step, done, len(self.accepted), error)) from error
                raise
            if progress:
                progress(done + 1, len(self.accepted), "replacing")
        source.finish()
        if quantized_by(model) is None:
            waiting = parameters_to_cast(model, dtype)
            while waiting:  # none is held longer than its own cast takes
                before.cast(waiting.pop(), dtype)
            cast_buffers(model, dtype, source.put)
        memory.off_files(chain(model.parameters(), model.buffers()))
        memory.collapse(chain(model.parameters(), model.buffers()))
        name_fillers(model, self.accepted)
        source.put(vars(model), BEFORE, Before.of(model, before))
        verdict, after_bytes = self.verdict, parameter_bytes(model)
        executed = self.plan.executed(self.accepted, verdict.refused, verdict.instead, after_bytes, verdict.notes)
        return replace(executed, receipts=verdict.receipts)

    def _rehearse(self, sharing: Sharing) -> dict[str, nn.Module]:
        """Make all replacements without values and undo them, so that errors surface while the model is unchanged.

        Return the new layers and modules by path. The real replacement frees old weights as it goes and cannot be
        undone.
        """
        with ExitStack() as undo:
            source = Rehearsal(self.model, undo)
            swaps = Swaps(replace(self.builder, source=source, fills=False), self.accepted, sharing)
            for step in self.accepted:
                if step.shape is not None:
                    work_of(step).put_in(swaps, step)
            return swaps.made


def _half_done(step: Step, done: int, steps: int, error: Exception) -> str:
    return (
        f"{in_brief(error)}, while {step.path or 'the attention'} was replaced; {done} of {steps} replacements are in "
        "place, and their old weights are gone: load the model again, with more memory free"
    )


def name_fillers(model: nn.Module, steps: Iterable[Step]) -> None:
    """Tell a cache which layers are of this model, and which one each is."""
    of_model = uuid4().hex
    for step in (step for step in steps if step.decodes):
        for part in model.get_submodule(step.path).modules():
            if isinstance(part, Mixer):
                part.filler = Filler(of_model, step.path)


def prove(
    plan: Plan,
    model: nn.Module,
    config: InferenceConfig,
    progress: Progress | None = None,
    group: Group = LOCAL,
    calls: Mapping[str, Call] | None = None,
) -> Proven:
    """Prove the steps of `plan` on a live `model`, in which nothing is replaced yet.

    `calls`: calls of its modules by path, recorded in a step of the model's pipeline. `group`: the ranks of the plan's
    mesh, which all take part in every proof. Raises ProofError under verify="strict" if a step fails its proof, and
    RankError if another rank has a different plan or is gone.
    """
    group.check_same({"the plan": plan.digest()}, "the plan")
    if group.size > 1:
        agree_on_weights(group, model, live_sums(model))
    return _proven(plan, LayerSource(model), config, progress, group, calls or {})


def apply(
    plan: Plan, model: nn.Module, config: InferenceConfig, progress: Progress | None = None, group: Group = LOCAL
) -> Plan:
    """Execute `plan` on a live `model` in place, after `prove`; return the plan as executed."""
    return prove(plan, model, config, progress, group).carry_out(progress)


def carry_out(
    plan: Plan, source: LayerSource, config: InferenceConfig, progress: Progress | None, group: Group
) -> Plan:
    """Like `apply`, but with the values of `source`; the ranks have already agreed on the plan and the values."""
    return _proven(plan, source, config, progress, group, {}).carry_out(progress)


@torch.no_grad()
def _proven(
    plan: Plan,
    source: LayerSource,
    config: InferenceConfig,
    progress: Progress | None,
    group: Group,
    calls: Mapping[str, Call],
) -> Proven:
    builder = Builder(source, plan.dtype, group, work_of)
    source.begin(progress)
    proofs = Proofs(Trial(plan, config, builder, calls))
    try:
        with lookups_in_range(source.device):
            proofs.run(progress)
    finally:
        plan.close()  # otherwise it keeps the old modules alive while they are replaced
    return Proven(plan, source, builder, proofs.verdict(), proofs.trial.modules)
