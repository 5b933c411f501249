"""Execute a plan in one loop over its steps: build on meta → fill → prove → swap → drop the old.

Peak memory is the model plus the merged matrices of one layer. A step that fails its proof is not swapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from infuse import interrupts
from infuse.apply.adopt import adopt
from infuse.apply.build import build
from infuse.apply.shared import Made
from infuse.apply.unknown import proven, together
from infuse.architectures.adapters import merging_refused
from infuse.architectures.packing import Fill
from infuse.architectures.quantized_elsewhere import quantized_by
from infuse.architectures.split import SplitShape
from infuse.config.inference import InferenceConfig
from infuse.device import Device
from infuse.dtype_cast import cast_buffers, cast_parameters
from infuse.errors import CheckpointError, ProofError, RankError
from infuse.layers.embedding import QuantizedEmbedding
from infuse.layers.hook import hook_name, install_hook, ran
from infuse.layers.linear import Linear, QuantizedLinear
from infuse.parallel.group import LOCAL, Group
from infuse.plan.bytes import parameter_bytes
from infuse.plan.decide import fallback
from infuse.plan.found import model_around, traits
from infuse.plan.plan import Plan
from infuse.plan.shared import Sharing
from infuse.plan.step import ATTENTION, BLOCK, LINEAR, SPLIT, Left, Step
from infuse.proof import compare
from infuse.proof.callers import Caller, find_callers, proven_alone
from infuse.proof.cases import Case, matrix_cases, recorded_cases
from infuse.proof.in_place import in_place_mismatch
from infuse.proof.sessions import block_sessions, decodes, model_sessions
from infuse.shards.save import is_packed, packed_fill
from infuse.unknown.install import put_part
from infuse.weights.alike import agree_on_weights, live_sums
from infuse.weights.fill import fill_module, fill_saved, is_there, moves
from infuse.weights.layer_source import LayerSource
from infuse.weights.state import keep_names

Progress = Callable[[int, int, str], None]  # done, total, description
_RECORDED_AT_ONCE = 3  # steps recorded per run; each holds some hundred rows of hidden states in memory


def apply(
    plan: Plan, model: nn.Module, config: InferenceConfig, progress: Progress | None = None, group: Group = LOCAL
) -> Plan:
    """Execute `plan` on a live `model` in place; return the plan as executed, with refused steps among `left`.

    `group` holds the ranks of the plan's mesh; all of them take part, also in every proof. Raises ProofError under
    verify="strict" if a step fails its proof; nothing has been swapped then. Raises RankError if another rank decided
    otherwise or is gone.
    """
    group.check_same({"the plan": plan.digest()}, "the plan")
    if group.size > 1:
        agree_on_weights(group, model, live_sums(model))
    return carry_out(plan, LayerSource(model), config, progress, group)


def carry_out(
    plan: Plan, source: LayerSource, config: InferenceConfig, progress: Progress | None, group: Group
) -> Plan:
    """Like `apply`, but with the values of `source`; the ranks have already agreed on the plan and the values."""
    model, run = source.model, _Run(plan, source, config, group)
    with torch.no_grad():
        source.begin(progress)
        run.prove(progress)
        accepted = run.accepted()
        made = Made(Sharing(model, accepted))
        for done, step in enumerate(accepted):
            source.step()
            run.swap(step, made)
            if progress:
                progress(done + 1, len(accepted), "replacing")
        source.finish()
        if quantized_by(model) is None:
            cast_parameters(model, plan.dtype)
            cast_buffers(model, plan.dtype, source.put)
    return plan.with_left(run.left, run.swapped, parameter_bytes(model), run.notes)


@dataclass
class _Run:
    plan: Plan
    source: LayerSource
    config: InferenceConfig
    group: Group
    refused: dict[tuple, str] = field(default_factory=dict)
    left: list[Left] = field(default_factory=list)
    swapped: list[Step] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    interpretations: dict[tuple, int] = field(default_factory=dict)
    callers: dict[str, Caller] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def model(self) -> nn.Module:
        return self.source.model

    def key(self, step: Step) -> tuple:
        """Key of a step: steps with equal keys replace modules of one kind alike and get the same verdict."""
        if self.config.verify == "all":
            return (step.path, step.depth)
        return (step.kind, *traits(self.model, step.path, is_linear=step.depth == LINEAR))

    def prove(self, progress: Progress | None) -> None:
        """Prove one step of each kind (or all) before anything is swapped, and record why steps are refused."""
        self.steps = candidates = list(self.plan.steps)
        off = self.config.verify == "off"  # split layers are proven anyway: only the proof selects their interpretation
        self.prove_steps(
            [step for step in candidates if not self.was_proven(step) and (step.depth == SPLIT or not off)], progress
        )
        while refused := [
            step for step in candidates if step.depth in (BLOCK, SPLIT) and self.key(step) in self.refused
        ]:
            device = Device.of(self.source.device)
            candidates = fallback(refused, self.model, self.config, device=device, mesh=self.plan.mesh)
            self.prove_steps(candidates, None)
            self.steps += candidates

    def prove_steps(self, candidates: list[Step], progress: Progress | None) -> None:
        samples: dict[tuple, Step] = {}
        for step in candidates:
            samples.setdefault(self.key(step), step)
        steps = list(samples.values())
        cases: dict[str, list[Case] | str] = {}
        # Linears are proven in their callers only on one rank, since ranks would have to synchronize in every call,
        # and only on a live model, since a checkpoint's dtypes differ from the model's.
        in_place = self.group.size == 1 and self.source.is_live
        called = [step.path for step in steps if step.depth == LINEAR] if in_place else []
        for done, step in enumerate(steps):
            interrupts.check()
            if done % _RECORDED_AT_ONCE == 0:
                cases = self.cases(steps[done : done + _RECORDED_AT_ONCE])
            found = cases.pop(step.path, [])
            if step.depth == LINEAR and called:  # late: recorded arguments take no memory during proofs of blocks
                self.callers, reasons = find_callers(self.model, called, self.source.running)
                self.notes, called = [*self.notes, *proven_alone(reasons)], []
            mismatch = self.agreed_mismatch(step, found)
            if mismatch is not None:
                if self.config.verify == "strict":
                    raise ProofError(f"{step.path}: {mismatch}")
                self.refused[self.key(step)] = mismatch
            if progress:
                progress(done + 1, len(steps), "proving")
        self.refused |= together([(step, self.key(step)) for step in candidates], self.refused)

    def agreed_mismatch(self, step: Step, cases: list[Case] | str) -> str | None:
        """Return why any rank refuses the step; None if it is proven on all. `cases` is a reason if there are none."""
        if step.depth == ATTENTION:
            mismatch = self.hook_mismatch(step)
        elif isinstance(cases, str):
            mismatch = cases
        elif step.depth == SPLIT:
            return self.split_mismatch(step, cases)  # the ranks have already agreed on it
        else:
            mismatch = self.mismatch(step, cases)
        return self.group.any_fault(mismatch, f"the proof of {step.path}")

    def cases(self, steps: Iterable[Step]) -> dict[str, list[Case] | str]:
        """The cases of each step by path, or the reason why it has none."""
        found: dict[str, list[Case] | str] = {}
        by_owner: dict[tuple[str | None, bool], list[Step]] = {}
        for step in steps:
            if step.depth in (BLOCK, SPLIT):
                # split layers are recorded in a run of the whole model
                owner = model_around(self.model, step.path) if step.depth == BLOCK else None
                by_owner.setdefault((owner, decodes(step)), []).append(step)
            elif step.shape is not None:
                (matrix,) = (step.whole or step.shape).matrices
                found[step.path] = matrix_cases(matrix, self.source.device)
        for (owner, on_cache), members in by_owner.items():
            layers = {step.path: self.model.get_submodule(step.path) for step in members}
            try:
                with self.source.running():
                    if owner is None:
                        recorded = recorded_cases(self.model, layers, model_sessions(self.model))
                    else:
                        model = self.model.get_submodule(owner)
                        recorded = recorded_cases(model, layers, block_sessions(model, on_cache))
            except CheckpointError:
                raise
            except Exception as error:  # the user's model may raise anything; if it cannot run, it cannot be proven
                recorded = {}
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            else:
                reason = "the model did not call it"
            for path in layers:
                found[path] = recorded.get(path) or f"not proven: the model could not be run up to it ({reason})"
        return found

    def was_proven(self, step: Step) -> bool:
        """True if the step was proven when saved; a tensor split across ranks is not read whole just for a proof."""
        shared = step.depth == SPLIT or any(fill.cut for fill in step.fills)
        return self.source.holds_replaced and (shared or step.depth == ATTENTION or is_packed(step))

    def mismatch(self, step: Step, cases: list[Case]) -> str | None:
        """Return why the step's new module differs from the original; None if it does not."""
        try:
            mismatch = self.alone_mismatch(step, cases)
            caller = self.callers.pop(step.path, None)  # pop it to free its recorded arguments
            return mismatch if mismatch or caller is None else self.in_place_mismatch(step, caller)
        except (CheckpointError, RankError):
            raise
        except Exception as error:  # a body or op that raises counts as a mismatch
            return f"not proven: {type(error).__name__}: {error}".partition("\n")[0]

    def alone_mismatch(self, step: Step, cases: list[Case]) -> str | None:
        """Return why the new module's outputs for `cases` differ from the original's; None if they do not."""
        old = self.model.get_submodule(step.path)
        with self.source.loaded(step.path):
            wanted = compare.expected(old, cases, self.plan.dtype)
            plain = replace(step, bodies=(), fills=tuple(replace(fill, format=None) for fill in step.fills))
            # A linear has no structure to verify; its result is compared below.
            if step.depth == BLOCK and (mismatch := compare.structure_mismatch(self.built(plain, None), cases, wanted)):
                return mismatch
            new = self.built(step, self.plan.dtype)
            return compare.result_mismatch(new, step, cases, wanted, self.plan.dtype)

    def in_place_mismatch(self, step: Step, caller: Caller) -> str | None:
        """Return why the module that calls a linear behaves differently with the new one; None if it does not."""
        dtype = next(self.model.get_submodule(step.path).parameters()).dtype
        with self.source.loaded(step.path):  # in the model's own dtype, which the chosen bodies may not support
            new = self.built(step if dtype == self.plan.dtype else replace(step, bodies=()), None)
        with self.source.running():
            return in_place_mismatch(caller, new)

    def split_mismatch(self, step: Step, cases: list[Case]) -> str | None:
        """Return why no interpretation of a split layer matches the original; None if one does, which is recorded."""
        with self.source.loaded(step.path):
            layer = self.model.get_submodule(step.path)
            number, mismatch = proven(layer, step, cases, self.source.reader(step.path), self.plan.dtype, self.group)
        self.interpretations[self.key(step)] = number
        return mismatch

    def built(self, step: Step, dtype: torch.dtype | None) -> nn.Module:
        """Build and fill the new module on its own; dtype None keeps the source's."""
        module = build(step, self.plan.dtype, self.group)
        return self.filled(module, step, step.fills, dtype)

    def built_to_stay(self, step: Step, made: Made) -> nn.Module:
        """Build and fill the new module, sharing tensors that earlier ones made from the same weights."""
        module = build(step, self.plan.dtype, self.group)
        fills = made.share(step, module)
        self.filled(module, step, fills, self.plan.dtype)
        made.remember(step, module, fills)
        return module

    def filled(self, module: nn.Module, step: Step, fills: Sequence[Fill], dtype: torch.dtype | None) -> nn.Module:
        old = self.model.get_submodule(step.path)
        stored = []
        if self.source.holds_replaced:
            stored = [fill for fill in fills if packed_fill(step, fill) and not is_there(fill, old)]
        made = [fill for fill in fills if fill not in stored]
        into = dtype or next(old.parameters()).dtype
        fill_module(module, made, self.source.reader(step.path), into, dict(step.bodies))
        fill_saved(module, step.path, stored, self.source.stored, self.plan.dtype)
        module.train(False)
        if step.depth != SPLIT:
            adopt(module, old, step.attn)
        return module

    def accepted(self) -> list[Step]:
        """Return the steps that are not refused; add the refused ones to `left` with the reason."""
        accepted: list[Step] = []
        for step in self.steps:
            reason = self.refused.get(self.key(step))
            if step.shares and all(other.path != step.shares for other in accepted):
                reason = reason or f"{step.shares}, whose weight it shares, was refused"
            if reason is None:
                accepted.append((step, *step.others)[self.interpretations.get(self.key(step), 0)])
            else:
                self.left.append(Left(step.path, f"refused: {reason}"))
        return accepted

    def hook_mismatch(self, step: Step) -> str | None:
        """Return why the model behaves differently with our attention; None if it does not."""
        model: Any = self.model
        before = model.config._attn_implementation
        try:
            with self.source.running():
                wanted = compare.model_outputs(model)
                body = dict(step.bodies)["attention"]
                model.set_attn_implementation(hook_name(body))
                before_ran = ran[body]
                mismatch = compare.hook_mismatch(compare.model_outputs(model), wanted)
            return mismatch or (None if ran[body] > before_ran else "the model's attention does not come through it")
        except CheckpointError:
            raise
        except Exception as error:  # if it cannot run, it cannot be proven
            return f"not proven: {type(error).__name__}: {error}".partition("\n")[0]
        finally:
            model.set_attn_implementation(before)

    def sharing(self, step: Step) -> nn.Module:
        """Build the embedding that shares the weight of its head, which has already been swapped in."""
        new: Any = build(step, self.plan.dtype, self.group)
        head = self.model.get_submodule(step.shares)
        assert isinstance(head, QuantizedLinear if isinstance(new, QuantizedEmbedding) else Linear)
        new.share(head)
        adopt(new.train(False), self.model.get_submodule(step.path))
        return new

    def swap(self, step: Step, made: Made) -> None:
        """Replace the old module everywhere: some models use one layer in several places."""
        self.swapped.append(replace(step, others=()))
        if step.depth == ATTENTION:
            install_hook(self.model, dict(step.bodies)["attention"], self.source.put)
            return
        old = self.model.get_submodule(step.path)
        if isinstance(step.shape, SplitShape):
            part = self.built_to_stay(step, made)
            keep_names(
                old, old, step.path, step.fills, dtype=self.plan.dtype, bodies=dict(step.bodies), put=self.source.put
            )
            for matrix in step.shape.matrices:
                adopt(part.get_submodule(matrix.target), old.get_submodule(matrix.target))
            put_part(old, step.shape, part, self.source.put, self.group, step.path)
            return
        parameters = dict(old.named_parameters())
        for fill in step.fills:
            if moves(fill) and fill.sources[0] in parameters:
                self.source.hand_on(parameters[fill.sources[0]], self.plan.dtype)
        new = self.sharing(step) if step.shares else self.built_to_stay(step, made)
        keep_names(
            new, old, step.path, step.fills, dtype=self.plan.dtype, bodies=dict(step.bodies), put=self.source.put
        )
        for module in list(self.model.modules()):
            for name, child in module._modules.items():
                if child is old:
                    self.source.put(module._modules, name, new)
                    for method, refusal in merging_refused(module, step.formats).items():
                        self.source.put(vars(module), method, refusal)
