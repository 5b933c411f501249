"""The engines of a model and of a pipeline. `init_inference` makes them; `plan` shows what it would do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, overload

import torch
from torch import nn

from infuse.apply.restore import restore as put_back
from infuse.config.inference import InferenceConfig
from infuse.engine.model import InferenceEngine, check_model, planned, readings_of
from infuse.engine.pipeline import PipelineEngine, PipelinePlan, is_pipeline, models_of, pipeline_plan
from infuse.ground import interrupts
from infuse.ground.errors import ConfigError
from infuse.plan.plan import Plan

__all__ = [
    "InferenceEngine", "PipelineEngine", "PipelinePlan", "explain", "inference", "init_inference", "plan", "restore",
]  # fmt: skip


@overload
def plan(model: nn.Module, config: Any = None, **kwargs: Any) -> Plan: ...
@overload
def plan(model: Any, config: Any = None, **kwargs: Any) -> Any: ...
def plan(model: Any, config: Any = None, **kwargs: Any) -> Any:
    """Return what `init_inference` would do to `model` (live or on meta) without doing it. Its `str` is a table.

    For a pipeline of diffusers, return a PipelinePlan. With several ranks, return rank 0's plan.
    """
    settings = InferenceConfig.make(config, **kwargs)
    with interrupts.held_back():  # layers without a spec run on meta, with hooks on them
        if is_pipeline(model):
            return pipeline_plan(model, settings)
        check_model(model)
        decided = planned(model, settings)
        decided.close()
        return decided


def explain(model: nn.Module, path: str, config: Any = None, **kwargs: Any) -> str:
    """Explain how the repeated layer at `path` of `model` (live or on meta) is read from its graph, or why it is not.

    Return the operations of a call in units, one line each: the part that has them, their names, and the line of the
    layer's source. ConfigError lists the layers if there is none at `path`.
    """
    settings = InferenceConfig.make(config, **kwargs)
    with interrupts.held_back():
        check_model(model)
        readings = readings_of(model, settings)
        if path not in readings.layers:
            known = ", ".join(readings.layers) or "none"
            raise ConfigError(f"explain: found {path!r}, which is no repeated layer of the model; its layers: {known}")
        return readings.explain(path)


@overload
def init_inference(model: nn.Module, config: Any = None, **kwargs: Any) -> InferenceEngine: ...
@overload
def init_inference(model: Any, config: Any = None, **kwargs: Any) -> Any: ...
def init_inference(model: Any, config: Any = None, **kwargs: Any) -> Any:
    """Make `model` fast in place and return it as an engine with the same `forward()` and `generate()`.

    A pipeline of diffusers is returned as a PipelineEngine with the same call. The configuration is that of
    `deepspeed.init_inference` (see InferenceConfig): nothing, a dict, a JSON path, keywords, or both. With `checkpoint`
    the values come from there, and the model may be on meta. Raises ConfigError for wrong configuration, NotAvailable
    for features that this version lacks, CheckpointError for files that are missing, broken or another model's, and
    ProofError under verify="strict"; the model is unharmed after any of them. Gradients do not pass through replaced
    layers.
    """
    # Weights made in inference mode could not be written to later, outside of it.
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        if is_pipeline(model):
            return PipelineEngine(model, config, **kwargs)
        return InferenceEngine(model, config, **kwargs)


def restore(model: Any) -> Any:
    """Put the original modules back into `model`, an engine, or a pipeline of diffusers, and return the model.

    Modules and Parameters that someone holds, as an optimizer does, are the same objects again. Values are today's, and
    exact where nothing was rounded. What was quantized or cast is dequantized or cast back, with a warning; Parameters
    that someone holds keep their own values. Hooks, buffers, tied weights and the generation config stay as they are
    now; training mode is as it was before. It takes the memory of the model and one layer. A model in which nothing was
    replaced stays as it is. Raises UnsupportedCall, with nothing changed, where the originals cannot be had again: a
    rank's part of a model, and linears of another library whose codes were taken.
    """
    if isinstance(model, (InferenceEngine, PipelineEngine)):
        return model.restore()
    for part in models_of(model).values() if is_pipeline(model) else (model,):
        check_model(part)
        put_back(part)
    return model


@contextmanager
def inference(model: Any, config: Any = None, **kwargs: Any) -> Iterator[Any]:
    """Call `init_inference` before the body, and `restore` after it: `with infuse.inference(model) as engine: ...`.

    For answers between steps of training. The keywords, and the errors, are those of `init_inference`.
    """
    engine = init_inference(model, config, **kwargs)
    try:
        yield engine
    finally:
        engine.restore()
