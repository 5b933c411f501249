"""Run one step of a whole diffusion pipeline and record its models' calls and results, and the image.

The pipeline runs as a shallow copy with its own scheduler, so that the user's scheduler keeps its state.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from infuse.ground import interrupts
from infuse.ground.errors import CheckpointError, RankError, in_brief
from infuse.ground.temporary_hooks import watched
from infuse.ground.undisturbed import undisturbed
from infuse.inputs.component import called_inside
from infuse.inputs.pipeline import pipeline_inputs
from infuse.proof.cases import CACHE, Call, recorded_call

FIRST_STEP = "the pipeline's own first step"


@dataclass
class Outcome:
    """`results`: tensors returned by the first call of each part, by (model, part) in call order."""

    image: Tensor
    results: dict[tuple[str, str], list[Tensor]]
    calls: dict[str, dict[str, Call]] = field(default_factory=dict)  # of modules: model → path → first call


class FirstStep:
    """Runs one step of `pipe`, with its `models` and always the same arguments."""

    def __init__(self, pipe: Any, models: Mapping[str, nn.Module]):
        self._pipe, self._models = pipe, models
        self.pixels = ""

    @torch.no_grad()
    def run(self, paths: Mapping[str, Iterable[str]] | None = None) -> Outcome:
        """Run the step. Record the first calls of the modules at `paths` of each model."""
        recorder = _Recorder()
        with ExitStack() as undo:
            undo.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            undo.enter_context(torch.random.fork_rng(self._devices()))
            for name, model in self._models.items():
                undo.enter_context(undisturbed(model))
                parts = {part: model.get_submodule(part) for part in called_inside(model) or ("",)}
                undo.enter_context(watched(parts, partial(recorder.called, name), partial(recorder.returned, name)))
                modules = {path: model.get_submodule(path) for path in (paths or {}).get(name, ())}
                calls = recorder.calls.setdefault(name, {})
                undo.enter_context(watched(modules, partial(recorder.record, name, calls), _nothing))
            arguments = pipeline_inputs(self._pipe, self._models)
            has_size = {"height", "width"} <= set(arguments)
            self.pixels = f"{arguments['height']} x {arguments['width']} pixels, " if has_size else ""
            result = self._copy()(**arguments)
        return Outcome(_first_image(result), recorder.results, recorder.calls)

    def _copy(self) -> Any:
        """Copy the pipeline, sharing its models. Bypass its __setattr__, which changes the config."""
        probe = copy.copy(self._pipe)
        for name, value in vars(self._pipe).items():
            if hasattr(value, "set_timesteps"):
                vars(probe)[name] = copy.deepcopy(value)
        vars(probe)["_progress_bar_config"] = {"disable": True}
        return probe

    def _devices(self) -> list[torch.device]:
        """GPUs whose random state a run may change."""
        devices = {parameter.device for model in self._models.values() for parameter in model.parameters()}
        return [device for device in devices if device.type == "cuda"]


@dataclass
class _Recorder:
    results: dict[tuple[str, str], list[Tensor]] = field(default_factory=dict)
    calls: dict[str, dict[str, Call]] = field(default_factory=dict)
    real: dict[str, Tensor | None] = field(default_factory=dict)  # model → mask of real tokens in its current call

    def called(self, model: str, part: str, args: tuple, kwargs: dict[str, Any]) -> None:
        interrupts.check()
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        self.real[model] = mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None

    def returned(self, model: str, part: str, args: tuple, output: Any) -> None:
        if (model, part) not in self.results:
            values = output.values() if isinstance(output, Mapping) else output
            values = values if isinstance(output, (Mapping, tuple, list)) else (output,)
            self.results[model, part] = [tensor.float().cpu() for tensor in values if _is_floating(tensor)]

    def record(self, model: str, calls: dict[str, Call], path: str, args: tuple, kwargs: dict[str, Any]) -> None:
        if path in calls or not (args or "hidden_states" in kwargs):
            return
        call = recorded_call(args, kwargs, self.real.get(model))
        if all(value is not CACHE for value in (*call.args, *call.kwargs.values())):
            calls[path] = call


def first_outcome(step: FirstStep, paths: Mapping[str, Iterable[str]]) -> Outcome | str:
    """Return the outcome of the original's step, with its modules' calls, or the reason why it cannot run alone."""
    try:
        return step.run(paths)
    except (CheckpointError, RankError):
        raise
    except Exception as error:  # pipelines may need inputs of any kind
        return in_brief(error)


def _nothing(path: str, args: tuple, output: Any) -> None:
    pass


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _first_image(result: Any) -> Tensor:
    """Return the first image, or the frames of the first video, in float32."""
    first = result[0]
    while isinstance(first, (list, tuple)):
        first = first[0]
    first = torch.from_numpy(first) if isinstance(first, np.ndarray) else first
    if not isinstance(first, Tensor):
        raise TypeError(f"it returned {type(first).__name__}, not tensors")
    return first[0].float().cpu() if first.dim() > 3 else first.float().cpu()
