"""Prove the steps of a plan before anything is swapped, one of each kind or all of them, on all ranks in step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import nn

from infuse import interrupts
from infuse.apply.build import Builder
from infuse.apply.unknown import proven, together
from infuse.architectures.deepspeed import RoutedShape, without_drops
from infuse.architectures.experts import ExpertsShape
from infuse.architectures.layer import LayerShape
from infuse.architectures.module import ModuleShape
from infuse.architectures.plain import EmbeddingShape, LinearShape
from infuse.config.inference import InferenceConfig
from infuse.device import Device
from infuse.errors import CheckpointError, ProofError, in_brief
from infuse.inputs.model import like
from infuse.layers.hook import counted, install_hook
from infuse.plan.bytes import has_state
from infuse.plan.decide import fallback
from infuse.plan.found import model_around, traits
from infuse.plan.plan import Plan
from infuse.plan.step import Left, Step
from infuse.proof import compare
from infuse.proof.cases import Call, Case, expert_cases, matrix_cases, recorded_cases, routed_cases
from infuse.proof.components import component_cases
from infuse.proof.first_step import FIRST_STEP
from infuse.proof.in_place import Caller, find_callers, in_place_mismatch, proven_alone
from infuse.proof.sessions import block_sessions, model_sessions
from infuse.shards.save import packed_paths
from infuse.undisturbed import undisturbed
from infuse.weights.undo import put

COMPONENT = "the whole component"  # instead of the path of the model around a step
_NOT_RUN = "the original does not run on random inputs of its own"
_RECORDED_AT_ONCE = 3  # steps recorded per run; each holds some hundred rows of hidden states in memory


@dataclass
class Proofs:
    """The verdict on each step of a plan and, for refused layers, on the steps that are tried instead."""

    plan: Plan
    config: InferenceConfig
    builder: Builder
    calls: Mapping[str, Call] = field(default_factory=dict)  # of modules, by path, in a step of the model's pipeline
    steps: list[Step] = field(default_factory=list)
    refused: dict[tuple, str] = field(default_factory=dict)
    interpretations: dict[tuple, int] = field(default_factory=dict)
    callers: dict[str, Caller] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    modules: list[tuple[Step, nn.Module]] = field(default_factory=list)  # those that the swaps can use
    _keys: dict[int, tuple[Step, tuple]] = field(default_factory=dict)  # by id of the step, which is held with it
    _kinds: dict[tuple, int] = field(default_factory=dict)  # numbered, as they take long to compare

    @property
    def model(self) -> nn.Module:
        return self.builder.source.model

    def key(self, step: Step) -> tuple:
        """Key of a step: steps with equal keys replace modules of one kind alike and get the same verdict."""
        if self.config.verify == "all":
            return (step.path, step.depth)
        if id(step) not in self._keys:
            kind = (step.kind, *traits(self.model, step.path, is_called=step.is_called))
            self._keys[id(step)] = step, (self._kinds.setdefault(kind, len(self._kinds)),)
        return self._keys[id(step)][1]

    def run(self, progress: Callable[[int, int, str], None] | None) -> None:
        """Prove the plan's steps and record why steps are refused. ProofError under verify="strict"."""
        with undisturbed(self.model):
            self._run(progress)

    def _run(self, progress: Callable[[int, int, str], None] | None) -> None:
        self.steps = candidates = list(self.plan.steps)
        # The interpretation of a layer that keeps its forward is chosen by its proof, also under verify="off".
        off = self.config.verify == "off"
        wanted = [step for step in candidates if not self._was_proven(step) and (step.keeps_forward or not off)]
        self._prove(wanted, progress)
        while refused := [step for step in candidates if step.is_layer and self.key(step) in self.refused]:
            device = Device.of(self.builder.source.device)
            instead = fallback(refused, self.model, self.config, device=device, mesh=self.plan.mesh)
            there = {(step.path, step.depth) for step in self.steps}  # experts inside of a layer that keeps its forward
            candidates = [step for step in instead if (step.path, step.depth) not in there]
            self._prove(candidates, None)
            self.steps += candidates

    def accepted(self) -> tuple[list[Step], list[Left]]:
        """The steps that are not refused, in the proven interpretation, and the refused ones with the reason."""
        accepted: list[Step] = []
        left: list[Left] = []
        for step in self.steps:
            reason = self.refused.get(self.key(step))
            if step.shares and all(other.path != step.shares for other in accepted):
                reason = reason or f"{step.shares}, whose weight it shares, was refused"
            if reason is None:
                chosen = (step, *step.others)[self.interpretations.get(self.key(step), 0)]
                accepted.append(replace(chosen, others=()))
            else:
                left.append(Left(step.path, f"refused: {reason}"))
        return accepted, left

    def _was_proven(self, step: Step) -> bool:
        """True if the step was proven when saved; a tensor split across ranks is not read whole just for a proof."""
        shared = step.keeps_forward or any(fill.cut for fill in step.fills)
        return self.builder.source.holds_replaced and (shared or step.shape is None or bool(packed_paths(step)))

    def _prove(self, candidates: Sequence[Step], progress: Callable[[int, int, str], None] | None) -> None:
        samples: dict[tuple, Step] = {}
        for step in candidates:
            samples.setdefault(self.key(step), step)
        steps = list(samples.values())
        cases: dict[str, list[Case] | str] = {}
        # Linears are proven in their callers only on one rank, since ranks would have to synchronize in every call,
        # and only on a live model, since a checkpoint's dtypes differ from the model's.
        in_place = self.builder.group.size == 1 and self.builder.source.is_live
        called = [step.path for step in steps if step.is_called] if in_place else []
        for done, step in enumerate(steps):
            interrupts.check()
            if step.path not in cases:
                cases |= self._cases(_recorded_together(steps[done:]))
            if step.is_called and called:  # late: recorded arguments take no memory during proofs of blocks
                self.callers, reasons = find_callers(self.model, called, self.builder.source.running)
                self.notes, called = [*self.notes, *proven_alone(reasons)], []
            mismatch = self._mismatch(step, cases.pop(step.path, []))
            if mismatch is not None:
                if self.config.verify == "strict" and _NOT_RUN not in mismatch:
                    raise ProofError(f"{step.path}: {mismatch}")
                self.refused[self.key(step)] = mismatch
            if progress:
                progress(done + 1, len(steps), "proving")
        self.refused |= together([(step, self.key(step)) for step in candidates], self.refused)

    def _cases(self, steps: Iterable[Step]) -> dict[str, list[Case] | str]:
        """The cases of each step by path, or the reason why it has none."""
        found: dict[str, list[Case] | str] = {}
        by_owner: dict[tuple[str | None, bool, tuple[str, ...]], list[str]] = {}
        for step in steps:
            if isinstance(step.shape, ModuleShape):
                by_owner.setdefault((COMPONENT, False, ()), []).append(step.path)
            elif step.is_layer:  # one that keeps its forward is recorded in a run of the whole model
                owner = None if step.keeps_forward else model_around(self.model, step.path)
                states = step.shape.call.values if isinstance(step.shape, LayerShape) else ()
                by_owner.setdefault((owner, step.decodes, states), []).append(step.path)
            elif isinstance(step.shape, RoutedShape):
                found[step.path] = routed_cases(step.shape.hidden, self.builder.source.device)
            elif isinstance(whole := step.whole or step.shape, ExpertsShape):
                found[step.path] = expert_cases(whole, self.builder.source.device)
            elif step.shape is not None:
                (matrix,) = (step.whole or step.shape).matrices
                found[step.path] = matrix_cases(matrix, self.builder.source.device)
        for (owner, on_cache, states), paths in by_owner.items():
            model = self.model if owner == COMPONENT else self.model.get_submodule(owner or "")
            layers = {path: self.model.get_submodule(path) for path in paths}
            own = {path: self.calls[path] for path in paths if path in self.calls}
            reason = "the model did not call it"
            recorded: dict[str, list[Case]] = {}
            try:
                with self.builder.source.running():
                    if owner == COMPONENT:
                        recorded = component_cases(model, layers, own)
                    else:
                        sessions = model_sessions(model)
                        if owner is not None:
                            recurs = any(map(has_state, self.plan.steps))
                            sessions = block_sessions(model, on_cache, self.config.kv_cache, states, recurs)
                        recorded = recorded_cases(model, layers, sessions)
                        for path, call in own.items():
                            recorded[path].append(Case(FIRST_STEP, (call,), (None,)))
            except CheckpointError:
                raise
            except Exception as error:  # the user's model may raise anything; if it cannot run, it cannot be proven
                reason = in_brief(error)
            for path in paths:
                found[path] = recorded.get(path) or f"not proven: the model could not be run up to it ({reason})"
        return found

    def _mismatch(self, step: Step, cases: list[Case] | str) -> str | None:
        """Return why any rank refuses the step; None if it is proven on all. `cases` is a reason if there are none."""
        if isinstance(cases, str):
            mismatch: str | None = cases
        elif step.keeps_forward:
            return self._split(step, cases)  # the ranks agree on each of its interpretations
        else:
            kind = LayerShape if isinstance(step.shape, ModuleShape) else type(step.shape)  # proven alike
            mismatch = compare.attempted(partial(_PROOFS[kind], self, step, cases))
        return self.builder.group.any_fault(mismatch, f"the proof of {step.path}")

    def _split(self, step: Step, cases: list[Case]) -> str | None:
        """Return why no interpretation of a split layer matches the original; record the one that does."""
        with self.builder.source.loaded(step.path):
            number, mismatch = proven(step, cases, self.builder)
        self.interpretations[self.key(step)] = number
        return mismatch

    def _module(self, step: Step, cases: list[Case], *, structure: bool = False) -> str | None:
        """Return why the new module's outputs for `cases` differ from the original's; None if they do not."""
        dtype = self.plan.dtype
        with self.builder.source.loaded(step.path):
            wanted = compare.expected(self.model.get_submodule(step.path), cases, dtype, _routers(step), step.exact)
            if structure and (mismatch := self._structure(step, cases, wanted)):
                return mismatch
            heads = [head for other, head in self.modules if step.shares and other.path == step.shares]
            new = self.builder.sharing(step, heads[0]) if heads else self.builder.built(step, dtype)
            mismatch = compare.result_mismatch(new, step, cases, wanted, dtype)
        if mismatch is None and not self.builder.source.is_live and not heads:  # beside a live model it takes memory
            self.modules.append((step, new))
        return mismatch

    def _structure(self, step: Step, cases: list[Case], wanted: compare.Expected) -> str | None:
        return compare.structure_mismatch(self.builder.built(step.plain, dtype=None), cases, wanted)

    def _called(self, step: Step, cases: list[Case]) -> str | None:
        """Like _module, and inside the module that calls the new one, if that is known."""
        mismatch = self._module(step, cases)  # it has no structure to verify
        caller = self.callers.pop(step.path, None)  # pop it to free its recorded arguments
        if mismatch or caller is None:
            return mismatch
        source, dtype = self.builder.source, like(self.model.get_submodule(step.path)).dtype
        with source.loaded(step.path):  # in the model's own dtype, which the chosen bodies may not support
            new = self.builder.built(step if dtype == self.plan.dtype else replace(step, bodies=()), dtype=None)
        with source.running():
            return in_place_mismatch(caller, new)

    def _routed(self, step: Step, cases: list[Case]) -> str | None:
        """Like _module, with an original that computes every token. Its caller reads more than what it returns."""
        with without_drops(self.model.get_submodule(step.path)):
            return self._module(step, cases)

    def _hook(self, step: Step, cases: list[Case]) -> str | None:
        """Return why a model inside behaves differently with our attention; None if it does not."""
        model: Any = self.model.get_submodule(step.path)
        body = dict(step.bodies)["attention"]
        with self.builder.source.running(), ExitStack() as undo:
            try:
                wanted = compare.model_outputs(model)
            except Exception as error:  # such as a tower that wants the sizes of pictures; nothing of ours has failed
                return f"{_NOT_RUN}: {in_brief(error)}"
            install_hook(model, body, partial(put, undo))
            with counted(body) as calls:
                mismatch = compare.hook_mismatch(compare.model_outputs(model), wanted)
        return mismatch or (None if calls else "the model's attention does not come through it")


_PROOFS: Mapping[type, Callable[[Proofs, Step, list[Case]], str | None]] = MappingProxyType(
    {
        LayerShape: partial(Proofs._module, structure=True),
        LinearShape: Proofs._called,
        ExpertsShape: Proofs._called,
        RoutedShape: Proofs._routed,
        EmbeddingShape: Proofs._module,
        type(None): Proofs._hook,
    }
)


def _recorded_together(steps: Sequence[Step]) -> list[Step]:
    """The first of `steps` to record in one run: modules all at once, since their inputs are small; layers a few."""
    if isinstance(steps[0].shape, ModuleShape):
        return [step for step in steps if isinstance(step.shape, ModuleShape)]
    return [step for step in steps[:_RECORDED_AT_ONCE] if not isinstance(step.shape, ModuleShape)]


def _routers(step: Step) -> Mapping[str, str]:
    """Routers of a block whose routes its proof fixes: path in the block → path in the layer."""
    return step.shape.recorded if isinstance(step.shape, LayerShape) else {}
