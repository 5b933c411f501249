"""The engines of a model and of a pipeline. `init_inference` makes them; `plan` shows what it would do."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, overload

import torch
from torch import nn

from infuse import interrupts
from infuse.config.inference import InferenceConfig
from infuse.engine.model import InferenceEngine, check_model, planned, readings_of
from infuse.engine.pipeline import PipelineEngine, PipelinePlan, is_pipeline, pipeline_plan
from infuse.errors import ConfigError
from infuse.plan.plan import Plan

__all__ = ["InferenceEngine", "PipelineEngine", "PipelinePlan", "explain", "init_inference", "plan"]


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
