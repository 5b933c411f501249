"""Decode steps without the model's own forward (generate/direct.py): the same tokens, and only where that is known."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from families import BY_NAME, inputs
from one_calls import blocks
from torch import Tensor, nn

import infuse
from infuse.layers.stack import Answer
from infuse.native import kernels

pytestmark = pytest.mark.skipif(isinstance(kernels(), str), reason=str(kernels()))
NEW = 9
# The first decode step is traced and made again; the prompt's step and the traced one are the model's.
DIRECT = NEW - 1
DIRECTLY = ["llama", "qwen3", "phi3", "gpt-neox", "qwen2-moe", "qwen3-moe", "llama-dynamic"]
# Models that compute something between their parts.
ELSEWHERE = {"gpt2": "adds positions", "granite": "scales the embedding", "gemma2": "caps the logits"}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each step that was asked of all blocks, whether it was made in one call."""
    found: list[bool] = []
    step = Answer.step

    def noted(self: Answer, x: Tensor, turns: tuple[Tensor, Tensor] | None) -> Tensor | None:
        out = step(self, x, turns)
        found.append(out is not None)
        return out

    monkeypatch.setattr(Answer, "step", noted)
    return found


def answer(model: Any, batch: int = 1, **asked: Any) -> Tensor:
    torch.manual_seed(3)
    given = inputs(BY_NAME["llama"], batch=batch, tokens=7)
    return model.generate(**given, **{"max_new_tokens": NEW, "do_sample": False, **asked})


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", DIRECTLY)
def test_the_same_tokens(name: str, batch: int, made: list[bool]) -> None:
    engine = infuse.init_inference(BY_NAME[name].make(), dtype="fp32")
    exact = answer(BY_NAME[name].make(), batch)
    assert torch.equal(answer(engine, batch), exact) and made == [True] * DIRECT
    assert torch.equal(answer(engine, batch), exact)
    assert made == [True] * (2 * DIRECT - 1), "the second answer's first step is traced, but not made again"


def test_numbers_of_layers_are_no_windows(made: list[bool]) -> None:
    """Qwen's `max_window_layers`, 28 in all configs, is not a length from which a mask is needed."""
    engine = infuse.init_inference(BY_NAME["qwen3"].make(max_window_layers=2), dtype="fp32")
    assert torch.equal(answer(engine), answer(BY_NAME["qwen3"].make())) and made == [True] * DIRECT


@pytest.mark.parametrize("name", ELSEWHERE)
def test_models_that_compute_between_their_parts_are_called(name: str, made: list[bool]) -> None:
    engine = infuse.init_inference(BY_NAME[name].make(), dtype="fp32")
    assert torch.equal(answer(engine), answer(BY_NAME[name].make())) and not made


def test_a_stream_that_is_changed_in_place_is_noticed(made: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors are the same ones, but their values are not: the step made again tells."""
    llama = BY_NAME["llama"]
    original, engine = llama.make(), infuse.init_inference(llama.make(), dtype="fp32")
    inner = type(original.model).forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        out = inner(self, *args, **kwargs)
        out.last_hidden_state.mul_(-1)
        return out

    monkeypatch.setattr(type(original.model), "forward", forward)
    assert torch.equal(answer(engine), answer(original)) and made == [True], "it was made again, once"


def test_padded_batches_and_other_modes_are_the_models(made: list[bool]) -> None:
    family = BY_NAME["llama"]
    engine = infuse.init_inference(family.make(), dtype="fp32")
    engine.generate(**inputs(family, batch=2, tokens=7, padding="left"), max_new_tokens=4)
    answer(engine, num_beams=2)
    answer(engine, use_cache=False)
    answer(engine, cache_implementation="static")
    assert not made


def test_router_hooks_are_called(made: list[bool]) -> None:
    engine = infuse.init_inference(BY_NAME["qwen2-moe"].make(), dtype="fp32")
    heard: list[int] = []
    routers = [block.mlp.router for block in blocks(engine.module) if hasattr(block.mlp, "router")]
    handle = routers[-1].register_forward_hook(lambda *_: heard.append(1))
    exact = answer(engine)
    assert len(heard) == NEW and not any(made)
    handle.remove()
    assert torch.equal(answer(engine), exact) and made.count(True) == DIRECT


def test_copies_trace_their_own_steps(made: list[bool]) -> None:
    engine = infuse.init_inference(BY_NAME["llama"].make(), dtype="fp32")
    exact = answer(engine)
    for module in (copy.deepcopy(engine.module), pickle.loads(pickle.dumps(engine.module))):
        made.clear()
        with torch.no_grad():
            blocks(module)[0].mlp.down.weight.mul_(-1)
        assert not torch.equal(answer(module), exact) and made == [True] * DIRECT
    assert torch.equal(answer(engine), exact)
