"""The cases on which each kind of step is proven: calls that the model makes, or random rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from torch import nn

from infuse.apply.trial import Trial
from infuse.architectures.foreign.deepspeed import RoutedShape
from infuse.architectures.layer import LayerShape
from infuse.architectures.parts.experts import ExpertsShape
from infuse.ground.errors import CheckpointError, in_brief
from infuse.plan.bytes import has_state
from infuse.plan.found import one_by_one
from infuse.plan.step import Step
from infuse.proof.cases import Call, Case, expert_cases, matrix_cases, recorded_cases, routed_cases
from infuse.proof.components import component_cases
from infuse.proof.first_step import FIRST_STEP
from infuse.proof.sessions import Session, block_sessions, model_sessions

Cases = dict[str, list[Case] | str]  # by path; or the reason why there are none
# Records the cases of layers, given their calls that are already recorded.
_Record = Callable[[Mapping[str, nn.Module], Mapping[str, Call]], dict[str, list[Case]]]


def of_blocks(trial: Trial, steps: Sequence[Step]) -> Cases:
    """Record runs of the nearest model around each layer that runs and calls it."""
    by_call: dict[tuple[bool, tuple[tuple[str, int], ...], bool, bool], list[str]] = {}
    for step in steps:
        assert isinstance(step.shape, LayerShape), step
        key = step.decodes, step.shape.states, step.shape.convolves, step.shape.pairs
        by_call.setdefault(key, []).append(step.path)
    recurs, cases = any(map(has_state, trial.plan.steps)), Cases()
    for (on_cache, states, convolves, pairs), paths in by_call.items():
        waiting = dict.fromkeys(paths)
        for around, layers in one_by_one(trial.model, waiting):
            model = trial.model.get_submodule(around)
            about = dict(recurs=recurs, convolves=convolves, pairs=pairs)
            sessions = partial(block_sessions, model, on_cache, trial.config.kv_cache, states, **about)
            found = _recorded(trial, layers, partial(_in_sessions, model, sessions))
            for path, recorded in found.items():
                if isinstance(recorded, str):
                    cases.setdefault(path, recorded)
                else:
                    cases[path] = recorded
                    waiting.pop(path)
    return cases


def of_split_layers(trial: Trial, steps: Sequence[Step]) -> Cases:
    """Record runs of the whole model, because the layers keep their forward."""
    record = partial(_in_sessions, trial.model, partial(model_sessions, trial.model))
    return _recorded(trial, [step.path for step in steps], record)


def of_modules(trial: Trial, steps: Sequence[Step]) -> Cases:
    """Record runs of the whole component."""
    return _recorded(trial, [step.path for step in steps], partial(component_cases, trial.model))


def of_routed(trial: Trial, steps: Sequence[Step]) -> Cases:
    shapes = {step.path: step.shape for step in steps if isinstance(step.shape, RoutedShape)}
    return {path: routed_cases(shape.hidden, trial.builder.source.device) for path, shape in shapes.items()}


def of_experts(trial: Trial, steps: Sequence[Step]) -> Cases:
    shapes = {step.path: step.whole or step.shape for step in steps}
    device = trial.builder.source.device
    return {path: expert_cases(shape, device) for path, shape in shapes.items() if isinstance(shape, ExpertsShape)}


def of_matrices(trial: Trial, steps: Sequence[Step]) -> Cases:
    """Random rows for linears, random indices for embeddings."""
    cases = Cases()
    for step in steps:
        shape = step.whole or step.shape
        assert shape is not None, step
        (matrix,) = shape.matrices
        cases[step.path] = matrix_cases(matrix, trial.builder.source.device)
    return cases


def of_attention(trial: Trial, steps: Sequence[Step]) -> Cases:
    """Return no cases: the proof runs the whole model."""
    return {step.path: [] for step in steps}


def _in_sessions(
    model: nn.Module,
    sessions: Callable[[], Iterable[Session]],
    layers: Mapping[str, nn.Module],
    calls: Mapping[str, Call],
) -> dict[str, list[Case]]:
    cases = recorded_cases(model, layers, sessions())
    for path, call in calls.items():
        cases[path].append(Case(FIRST_STEP, (call,), (None,)))
    return cases


def _recorded(trial: Trial, paths: Sequence[str], record: _Record) -> Cases:
    """Return the cases that `record` finds, or the reason why there are none."""
    layers = {path: trial.model.get_submodule(path) for path in paths}
    calls = {path: trial.calls[path] for path in paths if path in trial.calls}
    reason, cases = "the model did not call it", dict[str, list[Case]]()
    try:
        with trial.builder.source.running():
            cases = record(layers, calls)
    except CheckpointError:
        raise
    except Exception as error:  # the user's model may raise anything; if it cannot run, it cannot be proven
        reason = in_brief(error)
    return {path: cases.get(path) or f"not proven: the model could not be run up to it ({reason})" for path in paths}
