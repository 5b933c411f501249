"""Compare one step of a whole pipeline with replaced models to that of the originals, before replacing anything.

Each new module is built when called and dropped after the call, so memory never holds a second model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from infuse.apply.apply import Proven
from infuse.apply.build import Builder
from infuse.ground import interrupts
from infuse.ground.dtype_cast import in_dtype, kept_in_float32
from infuse.ground.errors import CheckpointError, ProofError, RankError, in_brief
from infuse.ground.memory import channels_last
from infuse.ground.temporary_hooks import TemporaryHooks, answered_by
from infuse.inputs.component import is_component
from infuse.inputs.model import like
from infuse.parallel.group import Group
from infuse.plan.step import Left, Step
from infuse.proof.compare import cast_value, distance
from infuse.proof.first_step import FIRST_STEP, FirstStep, Outcome
from infuse.quant.parse import quant_format

# Relative to a pixel's range. float32: the largest difference; 16 bits: the root mean square, as in modules' proofs.
_IMAGE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 4e-3, torch.float16: 5e-4}
# For a whole model's result, relative to its size: the rounding of hundreds of modules adds up.
_RESULT = {torch.float32: 5e-4, torch.float64: 5e-4, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@dataclass(frozen=True)
class _Fault:
    """Why the replaced step differs from the original, and the models that cause it, if known."""

    models: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Images:
    """The originals' outcomes of one step: `exact` in float32, `own` in the dtypes of the plans."""

    exact: Outcome
    own: Outcome

    @classmethod
    def of_originals(cls, step: FirstStep, recorded: Outcome, proven: Mapping[str, Proven]) -> Images:
        """Run the originals as needed. `recorded`: the outcome in the models' current dtypes."""
        wide = dict.fromkeys(proven, torch.float32)
        planned = {name: model.plan.dtype for name, model in proven.items()}
        exact = recorded if _are_in(proven, wide) else _outcome(step, proven, wide)
        if planned == wide:
            return cls(exact, exact)
        return cls(exact, recorded if _are_in(proven, planned) else _outcome(step, proven, planned))


def with_equal_images(
    step: FirstStep, recorded: Outcome, proven: Mapping[str, Proven], group: Group, *, strict: bool
) -> tuple[dict[str, Proven], str]:
    """Return `proven` without the models that change the pipeline's image, and a text about the comparison.

    `recorded`: the originals' outcome in their current dtypes. `strict`: raise ProofError instead of leaving a model.
    """
    kept = dict(proven)
    images, reason = _originals(step, recorded, kept)
    reason = group.any_fault(reason, FIRST_STEP)
    if images is None or reason is not None:
        return kept, f"{FIRST_STEP} ({step.pixels}1 step); its images were not compared: {reason}"
    while any(_steps(model) for model in kept.values()):
        outcome, fault = _replaced_outcome(step, kept)
        if outcome is not None:
            fault = _result_fault(images, outcome, kept) or _image_fault(images, outcome, kept)
        reason = group.any_fault(fault.reason if fault else None, FIRST_STEP)
        if reason is None and outcome is not None:
            return kept, f"{FIRST_STEP} ({step.pixels}1 step): {_text(images, outcome, kept)}"
        cause = group.broadcast_object(fault.models if fault else (), f"the fault in {FIRST_STEP}")
        cause = tuple(name for name in cause if kept[name].accepted) or tuple(kept)
        if strict:
            raise ProofError(f"{', '.join(cause)}: {reason}")
        kept |= {name: _without(kept[name], str(reason)) for name in cause}
    return kept, f"{FIRST_STEP} ({step.pixels}1 step): no model is replaced"


def _originals(step: FirstStep, recorded: Outcome, proven: Mapping[str, Proven]) -> tuple[Images | None, str | None]:
    """Return the originals' outcomes, or why they cannot be compared with."""
    if any(accepted.keeps_forward for model in proven.values() for accepted in model.accepted):
        return None, "ranks share layers that keep their forward"
    try:
        images = Images.of_originals(step, recorded, proven)
    except (CheckpointError, RankError):
        raise
    except Exception as error:  # some models run only in their own dtype
        return None, in_brief(error)
    return images, None if bool(torch.isfinite(images.exact.image).all()) else "the original's is not finite"


def _outcome(step: FirstStep, proven: Mapping[str, Proven], dtypes: Mapping[str, torch.dtype]) -> Outcome:
    """Run the step with the original modules in these dtypes."""
    with ExitStack() as undo:
        for name, proven_model in proven.items():
            undo.enter_context(_in_dtype(proven_model.model, dtypes[name]))
        return step.run()


def _replaced_outcome(step: FirstStep, proven: Mapping[str, Proven]) -> tuple[Outcome | None, _Fault | None]:
    """Run the step with the new modules; if it fails, return the model that was running."""
    running: list[str] = []
    try:
        with ExitStack() as undo:
            for name, proven_model in proven.items():
                undo.enter_context(_in_dtype(proven_model.model, proven_model.plan.dtype))
                for accepted in _steps(proven_model):
                    undo.enter_context(_replaced(name, proven_model.builder, accepted, running))
            return step.run(), None
    except (CheckpointError, RankError):
        raise
    except Exception as error:
        return None, _Fault(tuple(running), f"the pipeline failed in its first step: {in_brief(error)}")


def _steps(model: Proven) -> list[Step]:
    """List the steps that replace a module by themselves: not the attention hook, not those that share a weight."""
    return [step for step in model.accepted if step.shape is not None and not step.shares]


@contextmanager
def _in_dtype(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Run `model`, and the parts of it that pipelines call, in `dtype`, with arguments of its own dtype cast."""
    model_dtype = like(model).dtype
    with ExitStack() as undo:
        undo.enter_context(in_dtype(model, dtype, kept_in_float32(model, dtype)))
        if model_dtype != dtype:
            hooks = undo.enter_context(TemporaryHooks())
            for part in (model, *model.children()):
                hooks.before(part, partial(_cast_arguments, model_dtype, dtype), with_kwargs=True)
        yield


def _cast_arguments(
    model_dtype: torch.dtype, dtype: torch.dtype, module: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    return cast_value(args, dtype, None, model_dtype), cast_value(kwargs, dtype, None, model_dtype)


def _replaced(name: str, builder: Builder, step: Step, running: list[str]) -> AbstractContextManager[None]:
    """Redirect calls of the old module to the new one of `step`; each call sets `running` to the model's name."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        interrupts.check()
        running[:] = [name]
        new = builder.built(step, builder.dtype)
        if is_component(builder.source.model):
            channels_last(new)
        return type(new).forward(new, *args, **kwargs)  # hooks run around the old one; `new` may have taken this over

    return answered_by(builder.source.model.get_submodule(step.path), forward)


def _result_fault(images: Images, outcome: Outcome, proven: Mapping[str, Proven]) -> _Fault | None:
    """Find the first model, in call order, whose result is too far off."""
    for name, error, own_error, rounded in _errors(images, outcome, proven):
        dtype = proven[name].plan.dtype
        allowed = max(4 * own_error, _RESULT[dtype]) + rounded
        if not error <= allowed:
            place = f"{str(dtype).removeprefix('torch.')} ({FIRST_STEP}; {allowed:.1e} is allowed)"
            return _Fault(
                (name,), f"the model's result differs from the original's by {error:.1e} of its size in {place}"
            )
    return None


def _errors(
    images: Images, outcome: Outcome, proven: Mapping[str, Proven]
) -> Iterator[tuple[str, float, float, float]]:
    """Yield for each result its model, its error, the original's error, and the error allowed for the formats so far.

    Matrices are rounded independently, so the squares of their errors add up. The allowance is at most 1, the error of
    an all-zero result.
    """
    formats: dict[str, list[str]] = {}
    for (name, part), wanted in images.exact.results.items():
        formats[name] = [format for step in proven[name].accepted for format in step.formats.values()]
        tolerances = (quant_format(format).proof_tolerance for each in formats.values() for format in each)
        rounded = min(math.hypot(*tolerances), 1.0)
        theirs, ours = images.own.results[name, part], outcome.results.get((name, part), [])
        if len(ours) != len(wanted):
            yield name, math.inf, 0.0, rounded
            continue
        for a, b, c in zip(ours, theirs, wanted, strict=True):
            if bool(torch.isfinite(c).all()):
                yield name, distance(a, c), distance(b, c), rounded


def _image_fault(images: Images, outcome: Outcome, proven: Mapping[str, Proven]) -> _Fault | None:
    """Return why the image differs. The cause is the first model whose error exceeds the tolerance of a module."""
    error, allowed = _image_error(images, outcome, proven)
    if error <= allowed:
        return None
    reason = f"the pipeline's image differs by {error:.1e} of a pixel's range ({FIRST_STEP}; {allowed:.1e} is allowed)"
    for name, off, own_error, _ in _errors(images, outcome, proven):
        if off > max(2 * own_error, _RESULT[proven[name].plan.dtype] / 2):
            return _Fault((name,), reason)
    return _Fault((), reason)


def _image_error(images: Images, outcome: Outcome, proven: Mapping[str, Proven]) -> tuple[float, float]:
    """Error of the image relative to a pixel's range, and the allowed error (infinite with quantized weights)."""
    ours, theirs, exact = outcome.image, images.own.image, images.exact.image
    if ours.shape != exact.shape or not bool(torch.isfinite(ours).all()):
        return math.inf, 0.0
    scale = max(1.0, float(exact.abs().max()))
    dtypes = {model.plan.dtype for model in proven.values()}
    if dtypes == {torch.float32} and not _formats(proven):
        return float((ours - exact).abs().max()) / scale, _IMAGE[torch.float32]
    allowed = max([2 * _rms(theirs - exact) / scale, *(_IMAGE[dtype] for dtype in dtypes)])
    return _rms(ours - exact) / scale, math.inf if _formats(proven) else allowed


def _text(images: Images, outcome: Outcome, proven: Mapping[str, Proven]) -> str:
    """Describe the comparison for the plan."""
    error, allowed = _image_error(images, outcome, proven)
    text = f"the image differs by {error:.1e} of a pixel's range from the original's in float32"
    if images.own is not images.exact:
        text += f", the original's own by {_rms(images.own.image - images.exact.image):.1e}"
    if formats := _formats(proven):
        return f"{text}; not bounded, since weights are in {', '.join(formats)}"
    return f"{text} ({allowed:.1e} is allowed)"


def _formats(proven: Mapping[str, Proven]) -> list[str]:
    return sorted({format for model in proven.values() for step in model.accepted for format in step.formats.values()})


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _are_in(proven: Mapping[str, Proven], dtypes: Mapping[str, torch.dtype]) -> bool:
    """Whether the models' parameters have these dtypes, except those that stay in float32."""
    for name, proven_model in proven.items():
        exact = kept_in_float32(proven_model.model, dtypes[name])
        parameters = (p for key, p in proven_model.model.named_parameters() if key not in exact)
        if any(p.is_floating_point() and p.dtype != dtypes[name] for p in parameters):
            return False
    return True


def _without(model: Proven, reason: str) -> Proven:
    """Return the model with all its accepted steps refused."""
    refused = [Left(step.path, f"refused: {reason}") for step in model.accepted]
    verdict = replace(model.verdict, accepted=[], refused=[*model.verdict.refused, *refused])
    return replace(model, verdict=verdict)
