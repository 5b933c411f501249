"""Layers that keep a state beside keys and values (Falcon-H1): slots that go back together, and multipliers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import infuse
from infuse.architectures import bind_any, specs_for
from infuse.cache.kv_cache import KVCache
from infuse.cache.recurrence_slot import StateSlot
from infuse.layers.block import Block
from tests.models.families import BY_NAME, inputs
from tests.support.side_by_side import original, pair

NAME = "falcon_h1-gated-norm"


def bound(model: Any) -> Any:
    layer = model.model.layers[0]
    return bind_any(specs_for(layer), layer, model.config).shape.parts


def test_states_go_back_with_keys_and_values() -> None:
    cache = KVCache()
    keys = torch.randn(1, 2, 5, 4)
    cache.slot(0).update(keys, keys)
    state = cache.slot_of(0, "mamba", StateSlot)
    state.end(5, {"state": torch.zeros(1, 3)})
    cache.snapshot()
    cache.slot(0).update(keys, keys)
    state.end(5, {"state": torch.ones(1, 3)})
    assert cache.rewind(8) == 5 and state.length == cache.slot(0).length == 5
    assert not state.states["state"].any()


@pytest.mark.parametrize("candidates", [1, 4])
def test_tokens_that_are_taken_back_leave_no_trace(candidates: int) -> None:
    _, engine = pair(NAME)
    ids = inputs(BY_NAME[NAME], tokens=12)["input_ids"]
    cache = KVCache()
    with torch.no_grad():
        engine(ids[:, :7], past_key_values=cache)
        cache.snapshot()
        engine(ids[:, :candidates], past_key_values=cache)
        assert cache.rewind(7) == 7
        found: Tensor = engine(ids[:, 7:], past_key_values=cache).logits
        wanted = original(NAME)(ids).logits[:, 7:]
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


def test_the_copy_of_a_cache_goes_on_by_itself() -> None:
    _, engine = pair(NAME)
    ids = inputs(BY_NAME[NAME], tokens=12)["input_ids"]
    cache = KVCache()
    with torch.no_grad():
        engine(ids[:, :7], past_key_values=cache)
        other = copy.deepcopy(cache)
        found = [engine(ids[:, 7:], past_key_values=each).logits for each in (cache, other)]
    assert torch.equal(*found)


def test_multipliers_of_one_cost_nothing() -> None:
    parts = bound(BY_NAME["falcon_h1-gate-first"].make())
    assert parts["mamba"].factors is parts["self_attn"].factors is parts["mlp"].factors is None


def test_multipliers_have_the_digits_of_the_buffer() -> None:
    model = BY_NAME[NAME].make()
    numbers = tuple(model.config.ssm_multipliers)  # type: ignore[arg-type, union-attr]
    assert bound(model)["mamba"].factors.sections == pytest.approx(numbers, rel=1e-7)
    rounded = tuple(torch.tensor(numbers).bfloat16().tolist())
    assert bound(model.bfloat16())["mamba"].factors.sections == rounded != numbers


def test_a_cast_to_more_bits_brings_back_no_digits() -> None:
    model = BY_NAME[NAME].make().bfloat16().float()
    rounded = tuple(torch.tensor(model.config.ssm_multipliers).bfloat16().tolist())  # type: ignore[union-attr]
    assert bound(model)["mamba"].factors.sections == rounded


@pytest.mark.parametrize("shifted", [False, True], ids=["scaled", "shifted"])
def test_layers_whose_buffer_has_other_multipliers_are_left(shifted: bool) -> None:
    """With the proof off: the numbers are compared when the layer is bound."""

    def changed() -> Any:
        model: Any = BY_NAME[NAME].make()
        held = model.model.layers[1].mamba.mup_vector
        held.copy_(held.roll(1, dims=-1) if shifted else 1.5 * held)
        return model

    engine = infuse.init_inference(changed(), dtype="fp32", verify="off")
    left = {entry.path: entry.why for entry in reversed(engine.plan.left)}
    told = "the buffer mamba.mup_vector does not have the numbers of config.ssm_multipliers, [0.6, 1.4, 0.8, 1.2, 0.9]"
    assert told in left["model.layers.1"] and told in str(engine.plan)
    kinds = [isinstance(layer, Block) for layer in engine.module.model.layers]  # type: ignore[union-attr]
    assert kinds == [True, False, True]
    ids = inputs(BY_NAME[NAME], tokens=12)["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(engine(ids).logits, changed()(ids).logits, rtol=2e-5, atol=2e-5)


def test_the_state_space_has_a_mask_of_its_own() -> None:
    block: Any = pair(NAME)[1].module.model.layers[0]  # type: ignore[union-attr]
    x, mask = torch.randn(2, 5, 48), torch.ones(2, 4)
    turns = (torch.ones(1, 5, 12), torch.zeros(1, 5, 12))
    with torch.no_grad(), pytest.raises(infuse.UnsupportedCall, match="mamba_attention_mask has shape"):
        block(x, mamba_attention_mask=mask, position_embeddings=turns)
    with torch.no_grad(), pytest.raises(infuse.UnsupportedCall, match="as attention_mask"):
        block(x, attention_mask=mask, position_embeddings=turns)
