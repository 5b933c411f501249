"""Compare one step of a whole pipeline, its models replaced, with the originals' before anything is replaced.

Each new module is built when it is called and dropped after its call: memory holds no second model.
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

from infuse import interrupts
from infuse.apply.apply import Proven
from infuse.apply.build import Builder
from infuse.dtype_cast import in_dtype, kept_in_float32
from infuse.errors import CheckpointError, ProofError, RankError, in_brief
from infuse.inputs.component import is_component
from infuse.inputs.model import like
from infuse.memory import channels_last
from infuse.parallel.group import Group
from infuse.plan.step import Left, Step
from infuse.proof.compare import cast_value, distance
from infuse.proof.first_step import FIRST_STEP, FirstStep, Outcome
from infuse.quant.parse import quant_format
from infuse.temporary_hooks import TemporaryHooks, answered_by

# Of the range of a pixel. float32: the largest difference; 16 bits: the root mean square, as in the proofs of modules.
_IMAGE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 4e-3, torch.float16: 5e-4}
# Of a whole model's result, relative to its size: rounding of hundreds of modules adds up.
_RESULT = {torch.float32: 5e-4, torch.float64: 5e-4, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@dataclass(frozen=True)
class _Fault:
    """Why the step is not that of the originals, and the models that are the cause, as far as that is known."""

    models: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Images:
    """The originals' outcomes of one step: in float32, and in the dtypes of the plans."""

    exact: Outcome
    own: Outcome

    @classmethod
    def of_originals(cls, step: FirstStep, recorded: Outcome, proven: Mapping[str, Proven]) -> Images:
        """`recorded` is the outcome in the dtypes in which the models are."""
        wide = dict.fromkeys(proven, torch.float32)
        planned = {name: one.plan.dtype for name, one in proven.items()}
        exact = recorded if _are_in(proven, wide) else _outcome(step, proven, wide)
        if planned == wide:
            return cls(exact, exact)
        own = recorded if _are_in(proven, planned) else _outcome(step, proven, planned)
        return cls(exact, own)


def with_equal_images(
    step: FirstStep, recorded: Outcome, proven: Mapping[str, Proven], group: Group, *, strict: bool
) -> tuple[dict[str, Proven], str]:
    """`proven` without the models that change the pipeline's image, and what the comparison found, for the plan.

    `recorded` is the originals' outcome in the dtypes in which they are. ProofError instead of leaving one if `strict`.
    """
    kept = dict(proven)
    images, reason = _originals(step, recorded, kept)
    reason = group.any_fault(reason, FIRST_STEP)
    if images is None or reason is not None:
        return kept, f"{FIRST_STEP} ({step.pixels}1 step); its images were not compared: {reason}"
    while any(_steps(one) for one in kept.values()):
        found, fault = _replaced_outcome(step, kept)
        if found is not None:
            fault = _result_fault(images, found, kept) or _image_fault(images, found, kept)
        reason = group.any_fault(fault.reason if fault else None, FIRST_STEP)
        if reason is None and found is not None:
            return kept, f"{FIRST_STEP} ({step.pixels}1 step): {_text(images, found, kept)}"
        cause = group.broadcast_object(fault.models if fault else (), f"the fault in {FIRST_STEP}")
        cause = tuple(name for name in cause if kept[name].accepted) or tuple(kept)
        if strict:
            raise ProofError(f"{', '.join(cause)}: {reason}")
        kept |= {name: _without(kept[name], str(reason)) for name in cause}
    return kept, f"{FIRST_STEP} ({step.pixels}1 step): no model is replaced"


def _originals(step: FirstStep, recorded: Outcome, proven: Mapping[str, Proven]) -> tuple[Images | None, str | None]:
    """The originals' outcomes, or why nothing can be compared with them."""
    if any(each.keeps_forward for one in proven.values() for each in one.accepted):
        return None, "ranks share layers that keep their forward"
    try:
        images = Images.of_originals(step, recorded, proven)
    except (CheckpointError, RankError):
        raise
    except Exception as error:  # not every model runs in another dtype than its own
        return None, in_brief(error)
    return images, None if bool(torch.isfinite(images.exact.image).all()) else "the original's is not finite"


def _outcome(step: FirstStep, proven: Mapping[str, Proven], dtypes: Mapping[str, torch.dtype]) -> Outcome:
    """The step with the original modules in these dtypes."""
    with ExitStack() as undo:
        for name, one in proven.items():
            undo.enter_context(_in_dtype(one.model, dtypes[name]))
        return step.run()


def _replaced_outcome(step: FirstStep, proven: Mapping[str, Proven]) -> tuple[Outcome | None, _Fault | None]:
    """The step with the new modules, or the model in which it failed."""
    running: list[str] = []
    try:
        with ExitStack() as undo:
            for name, one in proven.items():
                undo.enter_context(_in_dtype(one.model, one.plan.dtype))
                for each in _steps(one):
                    undo.enter_context(_replaced(name, one.builder, each, running))
            return step.run(), None
    except (CheckpointError, RankError):
        raise
    except Exception as error:
        return None, _Fault(tuple(running), f"the pipeline failed in its first step: {in_brief(error)}")


def _steps(one: Proven) -> list[Step]:
    """The steps that one call can replace: neither the attention hook nor what shares another module's weight."""
    return [step for step in one.accepted if step.shape is not None and not step.shares]


@contextmanager
def _in_dtype(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Run `model`, and the parts of it that pipelines call, in `dtype`, with arguments of its own dtype cast."""
    own = like(model).dtype
    with ExitStack() as undo:
        undo.enter_context(in_dtype(model, dtype, kept_in_float32(model, dtype)))
        if own != dtype:
            hooks = undo.enter_context(TemporaryHooks())
            for part in (model, *model.children()):
                hooks.before(part, partial(_cast_arguments, own, dtype), with_kwargs=True)
        yield


def _cast_arguments(
    own: torch.dtype, dtype: torch.dtype, module: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    return cast_value(args, dtype, None, own), cast_value(kwargs, dtype, None, own)


def _replaced(name: str, builder: Builder, step: Step, running: list[str]) -> AbstractContextManager[None]:
    """Let the new module of `step` answer calls of the old one; `running` gets the model's name at each of them."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        interrupts.check()
        running[:] = [name]
        new = builder.built(step, builder.dtype)
        if is_component(builder.source.model):
            channels_last(new)
        return type(new).forward(new, *args, **kwargs)  # hooks run around the old one; `new` may have taken this over

    return answered_by(builder.source.model.get_submodule(step.path), forward)


def _result_fault(images: Images, found: Outcome, proven: Mapping[str, Proven]) -> _Fault | None:
    """The first model, in the order of the calls, whose result is too far off."""
    for name, error, own, rounded in _errors(images, found, proven):
        dtype = proven[name].plan.dtype
        allowed = max(4 * own, _RESULT[dtype]) + rounded
        if not error <= allowed:
            place = f"{str(dtype).removeprefix('torch.')} ({FIRST_STEP}; {allowed:.1e} is allowed)"
            return _Fault(
                (name,), f"the model's result differs from the original's by {error:.1e} of its size in {place}"
            )
    return None


def _errors(images: Images, found: Outcome, proven: Mapping[str, Proven]) -> Iterator[tuple[str, float, float, float]]:
    """For each result: its model, its error, the original's own, and what the formats so far may add.

    Matrices are rounded independently, so the squares of their errors add up; a result that is as far off as zeros
    would be is never right.
    """
    formats: dict[str, list[str]] = {}
    for (name, part), wanted in images.exact.results.items():
        formats[name] = [format for step in proven[name].accepted for format in step.formats.values()]
        tolerances = (quant_format(format).proof_tolerance for each in formats.values() for format in each)
        rounded = min(math.hypot(*tolerances), 1.0)
        own, ours = images.own.results[name, part], found.results.get((name, part), [])
        if len(ours) != len(wanted):
            yield name, math.inf, 0.0, rounded
            continue
        for a, b, c in zip(ours, own, wanted, strict=True):
            if bool(torch.isfinite(c).all()):
                yield name, distance(a, c), distance(b, c), rounded


def _image_fault(images: Images, found: Outcome, proven: Mapping[str, Proven]) -> _Fault | None:
    """Why the image is another one. The cause is the first model whose result is further off than a module's may be."""
    error, allowed = _image_error(images, found, proven)
    if error <= allowed:
        return None
    reason = f"the pipeline's image differs by {error:.1e} of a pixel's range ({FIRST_STEP}; {allowed:.1e} is allowed)"
    for name, off, own, _ in _errors(images, found, proven):
        if off > max(2 * own, _RESULT[proven[name].plan.dtype] / 2):
            return _Fault((name,), reason)
    return _Fault((), reason)


def _image_error(images: Images, found: Outcome, proven: Mapping[str, Proven]) -> tuple[float, float]:
    """The error of the image, of a pixel's range, and how much is allowed: with quantized weights, any finite one."""
    ours, own, exact = found.image, images.own.image, images.exact.image
    if ours.shape != exact.shape or not bool(torch.isfinite(ours).all()):
        return math.inf, 0.0
    scale = max(1.0, float(exact.abs().max()))
    dtypes = {one.plan.dtype for one in proven.values()}
    if dtypes == {torch.float32} and not _formats(proven):
        return float((ours - exact).abs().max()) / scale, _IMAGE[torch.float32]
    allowed = max([2 * _rms(own - exact) / scale, *(_IMAGE[dtype] for dtype in dtypes)])
    return _rms(ours - exact) / scale, math.inf if _formats(proven) else allowed


def _text(images: Images, found: Outcome, proven: Mapping[str, Proven]) -> str:
    """What was compared, for the plan."""
    error, allowed = _image_error(images, found, proven)
    text = f"the image differs by {error:.1e} of a pixel's range from the original's in float32"
    if images.own is not images.exact:
        text += f", the original's own by {_rms(images.own.image - images.exact.image):.1e}"
    if formats := _formats(proven):
        return f"{text}; not bounded, since weights are in {', '.join(formats)}"
    return f"{text} ({allowed:.1e} is allowed)"


def _formats(proven: Mapping[str, Proven]) -> list[str]:
    return sorted({format for one in proven.values() for step in one.accepted for format in step.formats.values()})


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _are_in(proven: Mapping[str, Proven], dtypes: Mapping[str, torch.dtype]) -> bool:
    """Whether the models' parameters have these dtypes, but for those that stay in float32."""
    for name, one in proven.items():
        exact = kept_in_float32(one.model, dtypes[name])
        held = (p.dtype for key, p in one.model.named_parameters() if p.is_floating_point() and key not in exact)
        if any(dtype != dtypes[name] for dtype in held):
            return False
    return True


def _without(one: Proven, reason: str) -> Proven:
    """The model as it was, with its steps among those that were refused."""
    refused = [Left(step.path, f"refused: {reason}") for step in one.accepted]
    verdict = replace(one.verdict, accepted=[], refused=[*one.verdict.refused, *refused])
    return replace(one, verdict=verdict)
