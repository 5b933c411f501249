"""The proof of each kind of step: return why the new module is refused, or None."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from infuse.apply.trial import Trial
from infuse.apply.unknown import proven
from infuse.architectures.foreign.deepspeed import without_drops
from infuse.architectures.layer import LayerShape
from infuse.ground.errors import in_brief
from infuse.inputs.model import like
from infuse.layers.attention.hook import counted, install_hook
from infuse.plan.found import models_around
from infuse.plan.step import Step
from infuse.proof import compare
from infuse.proof.cases import Case
from infuse.proof.in_place import Caller, in_place_mismatch
from infuse.weights.undo import put

NOT_RUN = "the original does not run on random inputs of its own"
_MOST_BYTES_AT_ONCE = 1 << 28  # of linears that are proven in one run of their caller
_NOT_CALLED = "the model's attention does not come through it"


def of_result(trial: Trial, step: Step, cases: list[Case], *, structure: bool = False) -> str | None:
    """Compare the new module's outputs with the original's; with `structure`, also in float32 without formats.

    The values of a checkpoint are in memory in one dtype at a time.
    """
    dtype, source, old = trial.plan.dtype, trial.builder.source, trial.model.get_submodule(step.path)
    by_rows = not structure and not step.exact and all(case.rows for case in cases)
    parts, anew = source.row_parts(step.path) if by_rows else None, source.loads_anew(step.path, dtype)
    with ExitStack() as loaded:
        if parts is not None:
            wanted = compare.expected_of_parts(parts, cases, dtype)
        else:
            loaded.enter_context(source.loaded(step.path))
            wanted = compare.expected_exact(old, cases, _routers(step))
            if structure and (mismatch := _structure_mismatch(trial, step, cases, wanted)):
                return mismatch
            if anew:
                loaded.close()
            with source.loaded(step.path, dtype=dtype, exact=step.exact) if anew else nullcontext():
                wanted = compare.with_own_error(wanted, old, cases, dtype, step.exact)
        heads = [head for other, head in trial.modules if step.shares and other.path == step.shares]
        new = trial.builder.sharing(step, heads[0]) if heads else trial.builder.built(step, dtype)
        mismatch = compare.result_mismatch(new, step, cases, wanted, dtype)
    if mismatch is None and not source.is_live and not heads:  # a live model leaves no memory for it
        trial.modules.append((step, new))
    return mismatch


def _structure_mismatch(trial: Trial, step: Step, cases: list[Case], wanted: compare.Expected) -> str | None:
    """Compare in float32, once for all steps that differ only in formats and bodies."""
    plain = step.plain
    key = (*trial.key(plain), plain.likeness)  # with verify="all", keys do not tell a place's candidates apart
    if key not in trial.structures:
        new = trial.builder.built(plain, _widest(trial.model.get_submodule(step.path)))
        trial.structures[key] = compare.structure_mismatch(new, cases, wanted)
    return trial.structures[key]


def _widest(module: nn.Module) -> torch.dtype | None:
    """The dtype that holds all values of the original: codes stand for float32 values, beside norms in 16 bits."""
    dtypes = (parameter.dtype for parameter in module.parameters() if parameter.is_floating_point())
    return max(dtypes, key=lambda dtype: dtype.itemsize, default=None)


def of_layer(trial: Trial, step: Step, cases: list[Case]) -> str | None:
    return of_result(trial, step, cases, structure=True)


def of_called(trial: Trial, step: Step, cases: list[Case]) -> str | None:
    """Compare the outputs, and the results of the calling module if it is known."""
    mismatch = of_result(trial, step, cases)  # it has no structure to verify
    caller = trial.callers.pop(step.path, None)  # pop it to free its recorded arguments
    if mismatch or caller is None:
        return mismatch
    if all(caller.kwargs is not kwargs for kwargs, _ in trial.calls_with_all):
        trial.calls_with_all.append((caller.kwargs, _is_proven_with_all(trial, step, caller)))
    is_proven = any(proven for kwargs, proven in trial.calls_with_all if kwargs is caller.kwargs)
    return None if is_proven else _in_caller(trial, caller, {caller.path: step})


def _is_proven_with_all(trial: Trial, step: Step, caller: Caller) -> bool:
    """Whether the caller gives the same with all the new linears of this one call of it, if they are not too large."""
    alike = {path: other for path, other in trial.callers.items() if other.kwargs is caller.kwargs}
    sizes = [sum(p.nbytes for p in trial.model.get_submodule(path).parameters()) for path in (step.path, *alike)]
    if not alike or sum(sizes) > _MOST_BYTES_AT_ONCE:
        return False
    steps = {caller.path: step, **{other.path: trial.called[path] for path, other in alike.items()}}
    return compare.attempted(partial(_in_caller, trial, caller, steps)) is None


def _in_caller(trial: Trial, caller: Caller, steps: Mapping[str, Step]) -> str | None:
    """Compare the results of the calling module with the new modules of steps at these paths in it, and without."""
    source, new = trial.builder.source, dict[str, nn.Module]()
    for path, step in steps.items():
        dtype = like(trial.model.get_submodule(step.path)).dtype
        with source.loaded(step.path):  # in the model's own dtype, which the chosen bodies may not support
            new[path] = trial.builder.built(step if dtype == trial.plan.dtype else replace(step, bodies=()), dtype=None)
    with source.running():
        return in_place_mismatch(caller, new)


def of_routed(trial: Trial, step: Step, cases: list[Case]) -> str | None:
    """Compare with an original that drops no token. Its caller is not run, because it reads more than the output."""
    with without_drops(trial.model.get_submodule(step.path)):
        return of_result(trial, step, cases)


def of_split_layer(trial: Trial, step: Step, cases: list[Case]) -> str | None:
    """Compare each interpretation of the layer with the original, and note the one that matches."""
    with trial.builder.source.loaded(step.path):
        number, mismatch = proven(step, cases, trial.builder)
    trial.interpretations[trial.key(step)] = number
    return mismatch


def of_attention(trial: Trial, step: Step, cases: list[Case]) -> str | None:
    """Compare the outputs of the model inside with our attention and without it; or those of a model around it."""
    reasons = []
    for path in dict.fromkeys((step.path, *models_around(trial.model, step.path))):
        reason = _of_attention(trial, step, trial.model.get_submodule(path))
        if reason is None or not reason.startswith((NOT_RUN, _NOT_CALLED)):
            return reason
        reasons.append(reason)
    return reasons[0]


def _of_attention(trial: Trial, step: Step, runs: nn.Module) -> str | None:
    """Compare the outputs of `runs`, the model inside or one around it."""
    model, body = trial.model.get_submodule(step.path), dict(step.bodies)["attention"]
    with trial.builder.source.running(), ExitStack() as undo:
        try:
            wanted = compare.model_outputs(runs)
        except Exception as error:  # e.g. a model of other inputs than we can make; not our failure
            return f"{NOT_RUN}: {in_brief(error)}"
        install_hook(model, body, partial(put, undo))
        with counted(body) as calls:
            mismatch = compare.hook_mismatch(compare.model_outputs(runs), wanted)
    is_called = not {type(module).__name__ for module in model.modules()}.isdisjoint(calls)
    return mismatch or (None if is_called else _NOT_CALLED)


def _routers(step: Step) -> Mapping[str, str]:
    """Routers of a block whose routes its proof fixes: path in the block → path in the layer."""
    return step.shape.recorded if isinstance(step.shape, LayerShape) else {}
