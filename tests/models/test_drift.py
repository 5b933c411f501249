"""Recurrent states after thousands of steps in bfloat16: they do not drift further away than the original's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import infuse
from infuse.cache.kv_cache import KVCache
from infuse.cache.recurrence_slot import StateSlot
from tests.models.families import BY_NAME

STEPS = 2000
FACTOR = 2


def ids_of(tokens: int) -> Tensor:
    return torch.randint(3, 96, (1, tokens), generator=torch.Generator().manual_seed(6))


def made(name: str) -> Any:
    changes = {"layer_types": ["linear_attention", "linear_attention", "full_attention"], "num_hidden_layers": 3}
    return BY_NAME[name].make(**changes)


@torch.inference_mode()
def states_after(model: Any, cache: Any, *, in_steps: bool) -> list[Tensor]:
    """The recurrent states of all layers, in transformers' form."""
    ids = ids_of(STEPS)
    for start, stop in ((0, 5), *((n, n + 1) for n in range(5, STEPS))) if in_steps else ((0, STEPS),):
        positions = torch.arange(start, stop)[None]
        model(input_ids=ids[:, start:stop], position_ids=positions, cache=cache, use_cache=True, logits_to_keep=1)
    if isinstance(cache, KVCache):
        return [slot.states["state"].float() for slot in cache.layers if isinstance(slot, StateSlot)]
    return [layer.recurrent_states[0].float() for layer in cache.layers if hasattr(layer, "recurrent_states")]


def distance(found: list[Tensor], exact: list[Tensor], turned: bool) -> float:
    pairs = [(one.transpose(2, 3) if turned else one, other) for one, other in zip(found, exact, strict=True)]
    assert all(one.shape == other.shape and bool(torch.isfinite(one).all()) for one, other in pairs)
    squares = sum(float((one - other).square().sum()) for one, other in pairs)
    return (squares / sum(float(other.square().sum()) for _, other in pairs)) ** 0.5


@pytest.mark.parametrize("in_steps", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["prompt", "steps"])
@pytest.mark.parametrize("name", ["qwen3_5", "granitemoehybrid"])
def test_states_drift_at_most_twice_as_far(name: str, in_steps: bool) -> None:
    exact_model, cast = made(name), made(name)
    for parameter in cast.parameters():  # as from_pretrained does: rotary frequencies stay in float32
        parameter.data = parameter.data.bfloat16()
    exact = states_after(exact_model, DynamicCache(config=exact_model.config), in_steps=in_steps)
    theirs = states_after(cast, DynamicCache(config=cast.config), in_steps=in_steps)
    engine = infuse.init_inference(made(name), dtype="bf16", progress=False)
    found = states_after(engine.module, KVCache(), in_steps=in_steps)
    error, allowed = distance(found, exact, name == "granitemoehybrid"), distance(theirs, exact, False)
    assert 0 < error <= FACTOR * allowed
