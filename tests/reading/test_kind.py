"""Kinds of layers: layers that are read alike are one kind, in every model of a process."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig

import infuse
from infuse.reading.kind import Kind, read_once
from tests.models.families import BY_NAME


@pytest.mark.parametrize("name", ["bert", "gpt2", "gemma3", "starcoder2"])
def test_another_model_reads_nothing_anew(name: str) -> None:
    """However it keeps its activation: as a module, a function, or a partial one."""
    family = BY_NAME[name]
    infuse.plan(family.make(), dtype=torch.float32, replace_with_kernel_inject=True)
    before = read_once.cache_info()
    plan = infuse.plan(family.make(), dtype=torch.float32, replace_with_kernel_inject=True)
    after = read_once.cache_info()
    assert any(step.depth == "block" for step in plan.steps)
    assert after.misses == before.misses and after.hits > before.hits


class Acts(nn.Module):
    def __init__(self, act: Any):
        super().__init__()
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x)


def test_partial_functions_are_compared_by_what_they_call() -> None:
    def kind(act: Any) -> Kind:
        return Kind(Acts(act), (), None, ())

    gelu, silu = nn.functional.gelu, nn.functional.silu
    assert kind(partial(gelu, approximate="tanh")) == kind(partial(gelu, approximate="tanh"))
    assert kind(partial(gelu, approximate="tanh")) != kind(partial(gelu, approximate="none"))
    assert kind(partial(gelu)) != kind(partial(silu)) and kind(partial(gelu)) != kind(gelu)


def test_a_reading_that_raises_leaves_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the layer is, and whoever is to blame: the model runs, and the plan says why."""

    def fails(layer: nn.Module, calls: Any) -> Any:
        raise ZeroDivisionError("made up")

    monkeypatch.setattr("infuse.reading.kind.read", fails)
    read_once.cache_clear()
    try:
        model = infuse.init_inference(BY_NAME["qwen2"].make(), dtype="fp32")
    finally:
        read_once.cache_clear()
    assert "cannot be read: ZeroDivisionError: made up" in str(model.plan)
    assert not any(step.depth == "block" for step in model.plan.steps)


TABLE = [1.0]


class Scales(nn.Module):
    scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale * TABLE[0]


def test_what_classes_and_files_hold_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model made after the user changed them is read anew."""

    def kind() -> Kind:
        return Kind(Scales(), (), None, ())

    before = kind()
    assert before == kind()
    monkeypatch.setattr(Scales, "scale", 2.0)
    assert before != kind()
    monkeypatch.undo()
    monkeypatch.setattr(sys.modules[__name__], "TABLE", [2.0])
    assert before != kind()


def test_a_config_of_a_layers_own_is_compared() -> None:
    def kind(factor: float) -> Kind:
        layer = Scales()
        layer.config = PreTrainedConfig(factor=factor)  # type: ignore[assignment]
        return Kind(layer, (), PreTrainedConfig(), ())

    assert kind(1.0) == kind(1.0) != kind(2.0)
