"""Kimi Delta Attention: gates, states in transformers' form, parameters that stay in float32, and state dicts.

All that other families give too is in tests/models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

import infuse
from infuse.cache.kv_cache import KVCache
from infuse.cache.recurrence_slot import StateSlot
from infuse.layers.attention.latent_attention import LatentAttention
from infuse.layers.native.one_call import StepCall
from infuse.layers.recurrent.channel_delta import ChannelDelta
from infuse.native import kernels
from tests.models.families import BY_NAME, CHANNEL_DELTA, inputs
from tests.support.one_calls import blocks, calls_noted, part_by_part
from tests.support.side_by_side import injected, pair
from tests.support.tolerance import assert_near

NAMES = [family.name for family in CHANNEL_DELTA]
TOLERANCE = 3e-5


def mixers(engine: infuse.InferenceEngine) -> list[Any]:
    return [module for module in engine.module.modules() if isinstance(module, ChannelDelta)]


@torch.no_grad()
def step(model: Any, ids: Tensor, cache: Any) -> Tensor:
    """The logits of new tokens on a cache, which grows."""
    return model(input_ids=ids, cache=cache, use_cache=True).logits


def close(found: Tensor, exact: Tensor) -> None:
    assert found.shape == exact.shape and found.dtype == exact.dtype
    assert float((found - exact).abs().max() / exact.square().mean().sqrt()) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_each_continues_from_states_that_the_other_left(name: str) -> None:
    model, engine = pair(name)
    ids = inputs(BY_NAME[name], tokens=12)["input_ids"]
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    close(step(engine, ids[:, :7], caches[1]), step(model, ids[:, :7], caches[0]))
    for layer, other in zip(*(cache.layers for cache in caches), strict=True):
        if hasattr(layer, "recurrent_states"):
            close(other.conv_states[0], layer.conv_states[0])
            close(other.recurrent_states[0], layer.recurrent_states[0])
    close(step(engine, ids[:, 7:10], caches[0]), step(model, ids[:, 7:10], caches[1]))
    close(step(engine, ids[:, 10:11], caches[1]), step(model, ids[:, 10:11], caches[0]))


@pytest.mark.parametrize("name", NAMES)
def test_beams_and_parts_of_a_prompt_on_our_cache(name: str) -> None:
    model, engine = pair(name)
    ids, ours, own = inputs(BY_NAME[name], tokens=12)["input_ids"], KVCache(), DynamicCache(config=model.config)
    for start, stop in ((0, 5), (5, 9)):
        close(step(engine, ids[:, start:stop], ours), step(model, ids[:, start:stop], own))
    for cache in (ours, own):
        cache.reorder_cache(torch.tensor([1, 1]))
    again = ids[[1, 1]]
    close(step(engine, again[:, 9:10], ours), step(model, again[:, 9:10], own))
    slots = [ours.slot(mixer.index, StateSlot) for mixer in mixers(engine)]
    for slot, mixer in zip(slots, mixers(engine), strict=True):
        held = sum(state[0].numel() for state in slot.states.values())
        assert held == mixer.shape.state_values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_decays_are_those_of_the_original(name: str, dtype: torch.dtype) -> None:
    """Also where the softplus is linear; in the dtype of the activations where the original rounds."""
    gate: Any = BY_NAME[name].make().model.layers[0].self_attn.forget_gate
    mixer: Any = mixers(pair(name)[1])[0]
    made = torch.randn(2, 5, gate.num_heads, gate.head_dim).to(dtype) * 20
    for leaf in [leaf for leaf, module in gate.named_children() if isinstance(module, nn.Linear)]:
        setattr(gate, leaf, nn.Identity())
    with torch.no_grad():
        exact = gate(made.flatten(2))
    found = mixer._decay(made, dtype)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, exact.float(), rtol=1e-5 if dtype is torch.float32 else 1e-2, atol=1e-6)
    assert not mixer.shape.rounded or torch.equal(found, found.to(dtype).float())


KEPT = {"kimi_linear": {"dt_bias"}, "bailing_hybrid": {"A_log", "conv", "dt_bias"}}


@pytest.mark.parametrize(("name", "exact"), KEPT.items(), ids=KEPT)
def test_parameters_that_transformers_keeps_in_float32_stay_so(name: str, exact: set[str], tmp_path: Path) -> None:
    family = BY_NAME[name]
    family.make().save_pretrained(tmp_path)
    loaded = family.model.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    with torch.device("meta"):
        empty = family.model(family.config(**family.values)).to(torch.bfloat16)
    given = inputs(family)
    for model, more in ((loaded, {}), (empty, {"checkpoint": str(tmp_path)})):
        engine = infuse.init_inference(model, dtype="bf16", progress=False, **more)
        assert len(mixers(engine)) == 2
        for mixer in mixers(engine):
            parameters = {leaf: parameter.dtype for leaf, parameter in mixer.named_parameters()}
            assert {leaf for leaf, dtype in parameters.items() if dtype is torch.float32} == exact, parameters
        assert bool(torch.isfinite(engine(**given).logits).all())


@pytest.mark.parametrize("name", NAMES)
def test_state_dicts_have_the_shapes_of_the_original(name: str) -> None:
    model, engine = BY_NAME[name].make(), injected(BY_NAME[name].make())
    exact, found = model.state_dict(), engine.module.state_dict()
    assert found.keys() == exact.keys() and all(torch.equal(found[key], exact[key]) for key in exact)
    other = BY_NAME[name].make(seed=3)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.9)
    engine.module.load_state_dict(other.state_dict())
    given = inputs(BY_NAME[name])
    with torch.no_grad():
        close(engine(**given).logits, other(**given).logits)


@torch.no_grad()
def steps(engine: Any, ids: Tensor, *, kept: bool) -> list[Tensor]:
    """Logits of a prompt, of steps of one token and of three, and of one from a state between these, and the states."""
    cache, found = KVCache(), []
    for start, stop in ((0, 9), (9, 10), (10, 11)):
        found.append(engine(input_ids=ids[:, start:stop], cache=cache, use_cache=True).logits)
    if kept:
        cache.snapshot(each=True)
    found.append(engine(input_ids=ids[:, 11:14], cache=cache, use_cache=True).logits)
    if kept:
        assert cache.rewind(13) == 13
        found.append(engine(input_ids=ids[:, 13:14], cache=cache, use_cache=True).logits)
    states = [cache.slot(mixer.index, StateSlot).states for mixer in mixers(engine)]
    return found + [state for each in states for state in each.values()]


@pytest.mark.skipif(isinstance(kernels(), str), reason=str(kernels()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_steps_in_one_call(name: str, kept: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = infuse.init_inference(BY_NAME[name].make(), dtype=dtype)
    assert not [block.extra_repr() for block in blocks(engine.module) if block.extra_repr()]
    for mixer in [module for module in engine.module.modules() if isinstance(module, LatentAttention)]:
        mixer._most_absorbed = 8
    ids = inputs(BY_NAME[name], batch=1 if kept else 2, tokens=14)["input_ids"]
    taken = calls_noted(StepCall, monkeypatch)
    found = steps(engine, ids, kept=kept)
    assert taken.count(True) == (4 if kept else 3) * len(blocks(engine.module))
    with part_by_part(engine.module):
        wanted = steps(engine, ids, kept=kept)
    for ours, theirs in zip(found, wanted, strict=True):
        assert_near(ours, theirs, dtype, name, times=4)
    # The first layer's inputs are the same to the bit, so its state tells whether decays were rounded alike.
    ours, theirs = (states[-2 * len(mixers(engine)) + 1] for states in (found, wanted))
    assert ours.dim() == 4 and float((ours - theirs).norm() / theirs.norm()) < 1e-5


def test_formats_of_low_ranks() -> None:
    engine = injected(BY_NAME["kimi_linear-low-rank"].make(), quant="int8:row", verify="strict")
    first = next(step for step in engine.plan.steps if step.depth == "block")
    assert {f"self_attn.{matrix}.weight" for matrix in ("in", "low", "decay", "gate", "out")} <= {*first.formats}
