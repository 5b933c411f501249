"""Apply: one loop over the steps of a plan: build on meta → fill → prove → swap → drop the old.

Peak memory is the model plus what one layer's merged matrices take. A step that is not proven is not swapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from infuse import pages, verify
from infuse.config import InferenceConfig
from infuse.errors import CheckpointError, ProofError, RankError
from infuse.layers.block import Block
from infuse.layers.combine import SideBySide, Sum
from infuse.layers.embedding import QuantizedEmbedding, RankEmbedding
from infuse.layers.hook import hook_name, ran
from infuse.layers.linear import Linear, QuantizedLinear, make_linear
from infuse.parallel.collectives import LOCAL, Group
from infuse.plan import ATTENTION, BLOCK, Left, Plan, Step, fallback
from infuse.plan_bytes import parameter_bytes
from infuse.saved import is_packed
from infuse.spec.layer import LayerShape
from infuse.spec.unknown import EmbeddingShape, LinearShape
from infuse.weights.fill import fill_module, fill_saved, is_there, moves
from infuse.weights.placing import Placing
from infuse.weights.reader import LiveReader

Progress = Callable[[int, int, str], None]  # done, of how many, what
_PLACES = ("layer_idx", "layer_id", "layer_number")  # the names that transformers gives to a layer's number


def apply(
    plan: Plan,
    model: nn.Module,
    config: InferenceConfig,
    progress: Progress | None = None,
    placing: Placing | None = None,
    group: Group = LOCAL,
) -> Plan:
    """Carry out `plan` on `model` in place; returns the plan as it was carried out, refused steps among `left`.

    Values are the model's own or, with `placing` (entered), a checkpoint's. `group` are the ranks that the plan's mesh counts: all
    of them take part, in every proof too. Raises ProofError under verify="strict" where a step fails its proof; nothing has been
    swapped then. RankError: another rank decided otherwise, or is gone.
    """
    group.agree(plan.digest(), "the plan")
    run = _Run(plan, model, config, placing, group)
    with torch.no_grad():
        if placing is not None:
            placing.place_rest(progress)
        run.prove(progress)
        accepted = run.accepted()
        for done, step in enumerate(accepted):
            run.swap(step)
            if progress:
                progress(done + 1, len(accepted), "replacing")
        if placing is not None:
            placing.place_left()
        cast_rest(model, plan.dtype)
    return plan.with_left(run.left, run.swapped, parameter_bytes(model))


@dataclass
class _Run:
    plan: Plan
    model: nn.Module
    config: InferenceConfig
    placing: Placing | None = None
    group: Group = LOCAL
    refused: dict[tuple, str] = field(default_factory=dict)
    left: list[Left] = field(default_factory=list)
    swapped: list[Step] = field(default_factory=list)
    classes: dict[tuple[type, type], type] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    def key(self, step: Step) -> tuple:
        """Steps with one key stand or fall together: alike in what is put in, and in what is taken out."""
        return (step.path,) if self.config.verify == "all" else (step.kind, traits(self.model.get_submodule(step.path)))

    def prove(self, progress: Progress | None) -> None:
        """Prove one step of each kind (or all), before anything is swapped; the refused are remembered with the reason."""
        self.steps = list(self.plan.steps)
        if self.config.verify == "off":
            return
        saved = self.placing is not None and self.placing.saved  # what ranks share was proven then, and the whole of it is not read again
        proven = [self.was_saved(step) or (saved and any(fill.cut for fill in step.fills)) for step in self.steps]
        self.prove_steps([step for step, done in zip(self.steps, proven, strict=True) if not done], progress)
        refused = [step for step in self.steps if step.depth == BLOCK and self.key(step) in self.refused]
        deeper = [linear for step in refused for linear in fallback(step, self.model, self.config, self.plan.mesh)]
        self.prove_steps(deeper, None)
        self.steps += deeper

    def prove_steps(self, candidates: list[Step], progress: Progress | None) -> None:
        samples: dict[tuple, Step] = {}
        for step in candidates:
            samples.setdefault(self.key(step), step)
        steps = list(samples.values())
        cases = self.cases(steps)
        for done, step in enumerate(steps):
            found = cases.get(step.path, [])
            if step.depth == ATTENTION:
                fault = self.hook_fault(step)
            else:
                fault = found if isinstance(found, str) else self.fault(step, found)
            fault = self.group.any_fault(fault, f"the proof of {step.path}")
            if fault is not None:
                if self.config.verify == "strict":
                    raise ProofError(f"{step.path}: {fault}")
                self.refused[self.key(step)] = fault
            if progress:
                progress(done + 1, len(steps), "proving")

    def cases(self, steps: Iterable[Step]) -> dict[str, list[verify.Case] | str]:
        """The cases of each step by its path, or why there are none."""
        found: dict[str, list[verify.Case] | str] = {}
        by_owner: dict[tuple[str, bool], list[Step]] = {}
        for step in steps:
            if step.depth == BLOCK:
                by_owner.setdefault((self.owner(step.path), verify.decodes(step)), []).append(step)
            elif isinstance(step.shape, EmbeddingShape):
                found[step.path] = verify.embedding_cases(step.shape.all_rows or step.shape.rows, self.device())
            elif isinstance(step.shape, LinearShape):
                found[step.path] = verify.linear_cases(step.shape.inputs, self.device())
        for (owner, decodes), members in by_owner.items():
            layers = {step.path: self.model.get_submodule(step.path) for step in members}
            try:
                with self.running():
                    recorded = verify.recorded_cases(self.model.get_submodule(owner), layers, decodes)
            except CheckpointError:
                raise
            except Exception as error:  # whatever the user's model does: what cannot be run cannot be proven
                recorded = {}
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            else:
                reason = "the model did not call it"
            for path in layers:
                found[path] = recorded.get(path) or f"not proven: the model could not be run up to it ({reason})"
        return found

    def was_saved(self, step: Step) -> bool:
        """Whether a step is read back."""
        return self.placing is not None and self.placing.saved and (step.depth == ATTENTION or is_packed(step))

    def device(self) -> torch.device:
        return self.placing.device if self.placing is not None else next(self.model.parameters()).device

    def running(self) -> AbstractContextManager[None]:
        """Where the model can run: from a checkpoint, layer by layer."""
        return nullcontext() if self.placing is None else self.placing.streaming()

    def original(self, step: Step) -> AbstractContextManager[None]:
        """Where the module that `step` replaces has its values."""
        return nullcontext() if self.placing is None else self.placing.loaded(step.path, None)

    def owner(self, path: str) -> str:
        """The path of the nearest model around a layer: what has embeddings and a config."""
        while path:
            path = path.rpartition(".")[0]
            module = self.model.get_submodule(path)
            if hasattr(module, "config") and hasattr(module, "get_input_embeddings"):
                return path
        return ""

    def fault(self, step: Step, cases: list[verify.Case]) -> str | None:
        """Why the step's new module is not the original, None if it is."""
        old = self.model.get_submodule(step.path)
        try:
            with self.original(step):
                wanted = verify.expected(old, cases, self.plan.dtype)
                plain = replace(step, bodies=(), fills=tuple(replace(fill, format=None) for fill in step.fills))
                # A linear has no structure to be wrong: what it computes is the next comparison.
                structure = verify.structure_fault(old, self.built(plain, None), cases, wanted) if step.depth == BLOCK else None
                return structure or verify.result_fault(self.built(step, self.plan.dtype), step, cases, wanted, self.plan.dtype)
        except (CheckpointError, RankError):
            raise
        except Exception as error:  # a body or an op that raises is a fault like any other
            return f"not proven: {type(error).__name__}: {error}".partition("\n")[0]

    def built(self, step: Step, dtype: torch.dtype | None) -> nn.Module:
        """The new module, filled; dtype None keeps the source's."""
        source = self.model.get_submodule(step.path)
        module = build(step, self.plan.dtype, self.group)
        reader = LiveReader(source) if self.placing is None else self.placing.source(step.path)
        bodies = dict(step.bodies)
        if self.placing is not None and self.was_saved(step):
            there = [fill for fill in step.fills if is_there(fill, source)]
            fill_module(module, there, reader, self.plan.dtype, bodies)
            fill_saved(module, step.path, [fill for fill in step.fills if fill not in there], self.placing.stored, self.plan.dtype)
        else:
            fill_module(module, step.fills, reader, dtype or next(source.parameters()).dtype, bodies)
        module.train(False)
        adopt(module, source, step.attn, self.classes)
        return module

    def accepted(self) -> list[Step]:
        """The steps that are not refused; those that are become `left`, with the reason."""
        accepted: list[Step] = []
        for step in self.steps:
            reason = self.refused.get(self.key(step))
            if step.shares and all(other.path != step.shares for other in accepted):
                reason = reason or f"{step.shares}, whose weight it shares, was refused"
            if reason is None:
                accepted.append(step)
            else:
                self.left.append(Left(step.path, f"refused: {reason}"))
        return accepted

    def hook_fault(self, step: Step) -> str | None:
        """Why the model is not the same with our attention, None if it is."""
        model: Any = self.model
        before = model.config._attn_implementation
        try:
            with self.running():
                wanted = verify.model_outputs(model)
                body = dict(step.bodies)["attention"]
                model.set_attn_implementation(hook_name(body))
                before_ran = ran[body]
                fault = verify.hook_fault(verify.model_outputs(model), wanted)
            return fault or (None if ran[body] > before_ran else "the model's attention does not come through it")
        except CheckpointError:
            raise
        except Exception as error:  # what cannot be run cannot be proven
            return f"not proven: {type(error).__name__}: {error}".partition("\n")[0]
        finally:
            model.set_attn_implementation(before)

    def sharing(self, step: Step) -> nn.Module:
        """The embedding over the weight of its head, which stands already."""
        new: Any = build(step, self.plan.dtype, self.group)
        head = self.model.get_submodule(step.shares)
        assert isinstance(head, QuantizedLinear if isinstance(new, QuantizedEmbedding) else Linear)
        new.share(head)
        adopt(new.train(False), self.model.get_submodule(step.path), "", self.classes)
        return new

    def swap(self, step: Step) -> None:
        """Put the new module wherever the old one is: some models apply one layer in several places."""
        if step.depth == ATTENTION:
            self.model.set_attn_implementation(hook_name(dict(step.bodies)["attention"]))  # type: ignore[operator]
            self.swapped.append(step)
            return
        old = self.model.get_submodule(step.path)
        parameters = dict(old.named_parameters())
        for fill in step.fills if self.placing is None else ():
            if moves(fill) and fill.sources[0] in parameters:  # cast here, for all who share it
                parameter = parameters[fill.sources[0]]
                parameter.data = pages.copied(parameter.data, self.plan.dtype)
        new = self.sharing(step) if step.shares else self.built(step, self.plan.dtype)
        for module in list(self.model.modules()):
            for name, child in module._modules.items():
                if child is old:
                    self.put(module._modules, name, new)
        self.swapped.append(step)

    def put(self, modules: MutableMapping[str, Any], name: str, new: nn.Module) -> None:
        if self.placing is not None:  # which gives the old back should anything fail from here on
            self.placing.put(modules, name, new)
        else:
            modules[name] = new


def traits(layer: nn.Module) -> tuple:
    """What tells layers of one class apart: their plain attributes but for their place, by which a spec may have gone wrong."""
    return tuple(
        (path, name, value)
        for path, module in layer.named_modules()
        for name, value in sorted(vars(module).items())
        if isinstance(value, (bool, int, float, str)) and name not in _PLACES and not name.startswith("_")
    )


def build(step: Step, dtype: torch.dtype, group: Group = LOCAL) -> nn.Module:
    """The empty module of a step, on meta; an embedding looks up in `dtype`. `group`: the ranks that share it."""
    bodies, shape, format = dict(step.bodies), step.shape, step.formats.get("weight")
    with torch.device("meta"):
        if isinstance(shape, LayerShape):
            return Block(shape, step.index, step.formats, bodies, group, step.path)
        if isinstance(shape, EmbeddingShape):
            of_all = Sum(group, step.path) if shape.all_rows else None
            return QuantizedEmbedding(shape, format, dtype, bodies, of_all) if format else RankEmbedding(shape, of_all)
        assert shape is not None, step
        joined = SideBySide(group, shape.widths, step.path) if shape.widths else None
        return make_linear(shape.inputs, shape.outputs, shape.bias, format, bodies, joined)


def adopt(new: nn.Module, old: nn.Module, attn: str, classes: dict[tuple[type, type], type]) -> None:
    """Make `new` stand where `old` stood: its attributes, its hooks and, for a block, its class.

    transformers records hidden states and attentions by the class of its layers and attention modules, so a block is an
    instance of the class that it replaces; models read attributes such as `attention_type` from their layers.
    """
    _take_over(new, old)
    if isinstance(new, Block):
        _mix_in(new, type(old), classes)
        new_attn, old_attn = new.get_submodule(attn.partition(".")[0]), old.get_submodule(attn)
        _take_over(new_attn, old_attn)
        _mix_in(new_attn, type(old_attn), classes)


def _take_over(new: nn.Module, old: nn.Module) -> None:
    for name, value in vars(old).items():
        if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
            object.__setattr__(new, name, value)  # the same dict, so that the handles which the user holds still remove
        elif not name.startswith("_") and name not in vars(new) and not isinstance(value, (torch.Tensor, nn.Module)):
            object.__setattr__(new, name, value)


def _mix_in(new: nn.Module, theirs: type, classes: dict[tuple[type, type], type]) -> None:
    ours = type(new)
    if (ours, theirs) not in classes:
        mixed = type(theirs.__name__, (ours, theirs), {"__module__": ours.__module__})
        mixed.forward = ours.forward  # type: ignore[attr-defined]  # not wrapped by what `theirs` does to its subclasses
        classes[ours, theirs] = mixed
    new.__class__ = classes[ours, theirs]


def cast_rest(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters outside of blocks. Buffers stay: rotary frequencies must not be rounded.

    `requires_grad` stays too: PyTorch's linear copies the whole weight for a strided x where it is False (2 s for an lm_head).
    """
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
