"""Layers that clamp their results in float16: results as the original's, also where they do not fit into float16."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import infuse
from infuse.architectures import BY_CLASS
from infuse.architectures.program import CLAMP, CLAMP_INFINITE
from infuse.layers.block import Block
from tests.models.encoder_decoders import BY_NAME, RELATIVES, encoded, made
from tests.reading import layers
from tests.reading.cases import ENCODER, Case
from tests.support.relatives import less

LIMIT = 64504.0  # 1000 below the largest number of float16
HALF = torch.float16
CLAMPS = {
    "whisper": CLAMP, "mbart": CLAMP, "pegasus": CLAMP, "m2m-100": CLAMP, "speech-to-text": CLAMP, "blenderbot": CLAMP,
    "bart": CLAMP_INFINITE, "plbart": CLAMP_INFINITE, "marian": CLAMP_INFINITE, "blenderbot-small": CLAMP_INFINITE,
    "bigbird-pegasus": CLAMP_INFINITE,
}  # fmt: skip


NORMS_LAST = ("bart", "plbart", "marian", "blenderbot-small")
OFTEN = torch.tensor([6e4, -6e4, 6e4, 65000.0])


def loud(name: str, kind: Any = None) -> Any:
    """A model in float16, of whose first results of the first encoder layer some are large, or too large."""
    model: Any = made(BY_NAME[name]).half()
    layer = model.get_encoder().layers[0]
    with torch.no_grad():
        if name in NORMS_LAST:
            layer.final_layer_norm.bias[:4] = OFTEN
        else:
            layer.fc2.bias[:4] = OFTEN
    return model


def first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("name", less(RELATIVES, CLAMPS))
def test_encoders_of_transformers(name: str) -> None:
    engine = infuse.init_inference(loud(name), dtype=HALF, verify="off", progress=False)
    ours, theirs = (model.get_encoder().layers[0] for model in (engine.module, loud(name)))
    assert isinstance(ours, Block) and ours.shape.program[-1].does == CLAMPS[name]
    for overflows in (True, False):
        x = torch.randn(2, 7, 48).to(HALF)
        for layer in (ours, theirs):
            with torch.no_grad():
                if name in NORMS_LAST:
                    norm = layer.norm2 if layer is ours else layer.final_layer_norm
                    norm.weight[:3] = 3e4 if overflows else 1.0
                elif overflows:
                    x[..., :3] = OFTEN[:3]
        with torch.no_grad():
            found, exact = (first(layer(x, attention_mask=None)) for layer in (ours, theirs))
        largest = 65000 if CLAMPS[name] == CLAMP_INFINITE and not overflows else LIMIT
        assert torch.isfinite(exact).all() and abs(float(exact.abs().max()) - largest) <= 16
        assert float(found.abs().max()) == float(exact.abs().max())
        torch.testing.assert_close(found, exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["m2m-100", "speech-to-text"])
def test_a_model_whose_buffers_are_wide(name: str) -> None:
    """Positions in float32 make hidden states of float32, in which layers do not clamp, when a model runs on meta."""
    plan = infuse.plan(made(BY_NAME[name]), dtype=HALF)
    programs = [step.shape.program for step in plan.steps if step.kind.is_layer and "encoder." in step.path]
    assert len(programs) == 2 and all(program[-1].does == CLAMP for program in programs)


@pytest.mark.parametrize("name", ["whisper", "bart"])
def test_answers(name: str) -> None:
    """Proven, and whole in both halves."""
    family = BY_NAME[name]
    engine = infuse.init_inference(made(family), dtype=HALF, progress=False)
    assert sum(isinstance(module, Block) for module in engine.module.modules()) == 4
    given = {key: value.half() if value.is_floating_point() else value for key, value in encoded(family).items()}
    exact, found = (model.generate(**given, num_beams=2, max_new_tokens=8) for model in (made(family).half(), engine))
    assert torch.equal(found, exact)


class Clamped(layers.EncoderLayer):
    """It clamps its result where it is not finite, in float16."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        return self.clamped(super().forward(hidden_states, attention_mask, **kwargs), hidden_states)

    def clamped(self, x: Tensor, given: Tensor) -> Tensor:
        if x.dtype == torch.float16 and (torch.isinf(x).any() or x.isnan().any()):
            x = x.clamp(-LIMIT, LIMIT)
        return x


class AsksForAnother(Clamped):
    def clamped(self, x: Tensor, given: Tensor) -> Tensor:
        if x.dtype == torch.float16 and not torch.isfinite(given).all():
            x = torch.clamp(x, min=-LIMIT, max=LIMIT)
        return x


class DoesMore(Clamped):
    def clamped(self, x: Tensor, given: Tensor) -> Tensor:
        if x.dtype == torch.float16 and not torch.isfinite(x).all():
            x = torch.clamp(x, min=-LIMIT, max=LIMIT) + given
        return x


class Asymmetric(Clamped):
    def clamped(self, x: Tensor, given: Tensor) -> Tensor:
        return torch.clamp(x, min=-LIMIT, max=2 * LIMIT) if x.dtype == torch.float16 else x


class AsksForASum(Clamped):
    def clamped(self, x: Tensor, given: Tensor) -> Tensor:
        return x.clamp(-LIMIT, LIMIT) if x.dtype == torch.float16 and bool(x.sum() > 1e4) else x


class AsksWhetherNoneIs(Clamped):
    def clamped(self, x: Tensor, given: Tensor) -> Tensor:
        return x.clamp(-LIMIT, LIMIT) if x.dtype == torch.float16 and torch.isinf(x).all() else x


class AsksWhetherOneIs(Clamped):
    def clamped(self, x: Tensor, given: Tensor) -> Tensor:
        return x.clamp(-LIMIT, LIMIT) if x.dtype == torch.float16 and not torch.isfinite(x).any() else x


def planned(layer: type, dtype: torch.dtype) -> Any:
    pieces = layers.Pieces(layer, ENCODER.attention, ENCODER.mlp, ENCODER.norm)
    return infuse.plan(Case("", "", of=pieces).make().to(dtype), dtype=dtype)


def test_a_layer_of_the_users(capfd: pytest.CaptureFixture[str]) -> None:
    whole = planned(Clamped, HALF)
    assert [step.path for step in whole.steps if step.kind.is_layer] == ["layers.0", "layers.1"]
    assert whole.steps[0].shape.program[-1].does == CLAMP_INFINITE
    assert all(step.does != CLAMP_INFINITE for step in planned(Clamped, torch.bfloat16).steps[0].shape.program)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "layer, why",
    [
        (AsksForAnother, "asks whether other values are finite"),
        (DoesMore, "does more than to clamp|left"),
        (Asymmetric, "clamp"),
        (AsksForASum, "branch on values"),
        (AsksWhetherNoneIs, "has no attribute 'all'"),
        (AsksWhetherOneIs, "has no attribute 'any'"),
    ],
)
def test_layers_that_stay(layer: type, why: str, capfd: pytest.CaptureFixture[str]) -> None:
    left = {each.path: each.why for each in planned(layer, HALF).left}
    assert re.search(why, left["layers.0"]), left["layers.0"]
    assert capfd.readouterr() == ("", ""), "PyTorch prints the graph of what it cannot trace"


def test_written_specs_say_that_their_layers_clamp() -> None:
    """Nothing else sees it: in float32 and bfloat16 they do not."""
    for name, specs in BY_CLASS.items():
        try:
            source = inspect.getsource(
                getattr(importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2])
            )
        except (ImportError, AttributeError):  # of another version of transformers
            continue
        clamps = "float16" in source and "clamp" in source
        assert all(bool(spec.clamps) is clamps for spec in specs if hasattr(spec, "clamps")), name
