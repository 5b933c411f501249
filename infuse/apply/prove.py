"""Prove the steps of a plan before anything is swapped, one of each kind or all of them, on all ranks in step.

If a step is refused, the next candidate of its place is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from infuse.apply.kinds import work_of
from infuse.apply.mismatch import NOT_RUN
from infuse.apply.receipts import Receipts
from infuse.apply.recording import Cases
from infuse.apply.trial import Trial
from infuse.apply.unknown import together
from infuse.ground import interrupts
from infuse.ground.cache_folder import are_used
from infuse.ground.device import Device
from infuse.ground.errors import ProofError
from infuse.ground.undisturbed import undisturbed
from infuse.plan.candidates import Candidate, Candidates
from infuse.plan.dequantized import without_kernels
from infuse.plan.effects import without_effect
from infuse.plan.packed import packed_paths
from infuse.plan.step import Left, Step
from infuse.proof import compare
from infuse.proof.cases import Case
from infuse.proof.identities import Identities, are_complete
from infuse.proof.in_place import find_callers, proven_alone

Progress = Callable[[int, int, str], None]  # done, total, description


@dataclass(frozen=True)
class Verdict:
    """Accepted steps in their proven interpretation, refused ones with reasons, candidates taken instead, and notes.

    `receipts`: of proofs that did not run again.
    """

    accepted: list[Step]
    refused: list[Left]
    instead: list[Candidate]
    notes: list[str]
    receipts: tuple[str, ...]


@dataclass
class Proofs:
    """Proofs of a plan's steps and, after refusals, of the next candidates of their places."""

    trial: Trial
    steps: list[Step] = field(default_factory=list)
    instead: dict[str, Candidate] = field(default_factory=dict)  # path of a place → the candidate tried last
    refused: dict[tuple, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    receipts: Receipts = field(default_factory=lambda: Receipts(None))

    def run(self, progress: Progress | None) -> None:
        """Prove the plan's steps and record why steps are refused. ProofError under verify="strict"."""
        trial = self.trial
        alone = trial.builder.group.size == 1 and not trial.calls
        if trial.config.verify == "sample" and alone and are_used() and are_complete():
            about = trial.plan, trial.model, trial.config, trial.builder.source
            self.receipts = Receipts(partial(Identities, *about))
        with undisturbed(trial.model):
            self._run(progress)

    def _run(self, progress: Progress | None) -> None:
        trial, key = self.trial, self.trial.key
        self.steps = tried = list(trial.plan.steps)
        candidates = Candidates(trial.model, tried, trial.plan.places)
        # The interpretation of a layer that keeps its forward is chosen by its proof, also under verify="off".
        off = trial.config.verify == "off"
        wanted = [step for step in tried if not self._was_proven(step) and (step.keeps_forward or not off)]
        self._prove(wanted, progress)
        while refused := [step for step in tried if step.is_layer and key(step) in self.refused]:
            tried = []
            for step, candidate in candidates.after(refused):
                self.instead[step.path] = candidate
                tried += candidate.steps
            self._prove(tried, None)
            self.steps += tried

    def verdict(self) -> Verdict:
        trial, key = self.trial, self.trial.key
        accepted: list[Step] = []
        refused: list[Left] = []
        for step in self.steps:
            reason = self.refused.get(key(step))
            if step.shares and all(other.path != step.shares for other in accepted):
                reason = reason or f"{step.shares}, whose weight it shares, was refused"
            if reason is None:
                chosen = (step, *step.others)[trial.interpretations.get(key(step), 0)]
                accepted.append(replace(chosen, others=()))
            else:
                refused.append(Left(step.path, f"refused: {reason}"))
        instead = list(self.instead.values())
        notes = [*self.notes, *self._notes_of(accepted, instead)]
        return Verdict(accepted, refused, instead, notes, self.receipts.texts())

    def _notes_of(self, accepted: Sequence[Step], instead: Sequence[Candidate]) -> list[str]:
        """Return the plan's notes on the candidates taken instead of refused steps."""
        if not instead:
            return []
        device = Device.of(self.trial.builder.source.device)
        choices = {op: choice for candidate in instead for op, choice in candidate.choices.items()}
        unused = without_effect(self.trial.model, self.trial.config, device, accepted)
        return [*unused, *without_kernels(choices, accepted, device)]

    def _was_proven(self, step: Step) -> bool:
        """True if the step was proven when saved; a tensor split across ranks is not read whole just for a proof."""
        shared = step.keeps_forward or any(fill.cut for fill in step.fills)
        return self.trial.builder.source.holds_replaced and (shared or step.shape is None or bool(packed_paths(step)))

    def _prove(self, tried: Sequence[Step], progress: Progress | None) -> None:
        trial, samples = self.trial, dict[tuple, Step]()
        for step in tried:
            samples.setdefault(trial.key(step), step)
        steps = self._without_receipts(list(samples.values()))
        what = f"proving {len(steps)} kinds, once on this machine" if self.receipts.are_kept else "proving"
        cases = Cases()
        # Linears are proven in their callers only on one rank, since ranks would have to synchronize in every call,
        # and only on a live model, since a checkpoint's dtypes differ from the model's.
        in_place = trial.builder.group.size == 1 and trial.builder.source.is_live
        called = [step.path for step in steps if step.is_called] if in_place else []
        trial.called, trial.calls_with_all = {step.path: step for step in steps if step.is_called}, []
        for done, step in enumerate(steps):
            interrupts.check()
            if step.path not in cases:
                work = work_of(step)
                alike = [other for other in steps[done:] if work_of(other) is work]
                cases |= work.cases(trial, alike[: work.at_once])
            if step.is_called and called:  # as late as possible: recorded arguments take memory
                trial.callers, reasons = find_callers(trial.model, called, trial.builder.source.running)
                self.notes, called = [*self.notes, *proven_alone(reasons)], []
            mismatch = self._mismatch(step, cases.pop(step.path))
            if mismatch is not None:
                if trial.config.verify == "strict" and NOT_RUN not in mismatch:
                    raise ProofError(f"{step.path}: {mismatch}")
                self.refused[trial.key(step)] = mismatch
            else:
                self.receipts.keep(step)
            if progress:
                progress(done + 1, len(steps), what)
        self.refused |= together([(step, trial.key(step)) for step in tried], self.refused)

    def _without_receipts(self, steps: list[Step]) -> list[Step]:
        """The steps to prove. Linears and experts are proven inside their callers, all of them or none."""
        unknown = [step for step in steps if not self.receipts.has(step)]
        if not any(step.is_called for step in unknown):
            return unknown
        for step in (step for step in steps if step.is_called):
            self.receipts.forget(step)
        return [step for step in steps if step.is_called or step in unknown]

    def _mismatch(self, step: Step, cases: list[Case] | str) -> str | None:
        """Return why any rank refuses the step; None if it is proven on all. `cases`: a reason if there are none."""
        prove = work_of(step).prove
        if isinstance(cases, str):
            mismatch: str | None = cases
        elif step.keeps_forward:
            return prove(self.trial, step, cases)  # the ranks agree on each of its interpretations
        else:
            mismatch = compare.attempted(partial(prove, self.trial, step, cases))
        return self.trial.builder.group.any_fault(mismatch, f"the proof of {step.path}")
