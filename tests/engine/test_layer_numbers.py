"""Layers that are copied without a number of their own, as in depth up-scaling: two have one place in a cache."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import infuse
from infuse.ground.errors import UnsupportedCall
from tests.models import encoder_decoders
from tests.models.families import BY_NAME

IDS = torch.randint(3, 96, (2, 8), generator=torch.Generator().manual_seed(2))
MIXERS = {"llama": "self_attn", "mistral": "self_attn", "mamba2": "mixer"}


def body(model: Any) -> Any:
    return model.backbone if hasattr(model, "backbone") else model.model


def upscaled(name: str, *, numbered: bool = False) -> Any:
    """With the second layer twice."""
    model: Any = BY_NAME[name].make()
    layers = body(model).layers
    layers.insert(2, copy.deepcopy(layers[1]))
    model.config.num_hidden_layers = len(layers)
    for number, layer in enumerate(layers if numbered else ()):
        layer.get_submodule(MIXERS[name]).layer_idx = number
        layer.layer_idx = number
    return model


def generated(model: Any, **more: Any) -> Tensor:
    return model.generate(IDS, max_new_tokens=4, do_sample=False, **more)


@pytest.mark.parametrize("name", MIXERS)
def test_two_layers_of_one_number_are_told_in_the_plan_and_at_the_call(name: str) -> None:
    engine = infuse.init_inference(upscaled(name), dtype="fp32", progress=False)
    notes = [note for note in engine.plan.notes if "have the same layer_idx 1" in note]
    assert len(notes) == 1 and "layers.1 and" in notes[0] and "layers.2 " in notes[0], engine.plan.notes
    assert "have the same layer_idx 1" in str(engine.plan)
    original = upscaled(name)
    if name == "mamba2":  # a layer of the last number is missing, so `generate` keeps transformers' own cache
        assert torch.equal(generated(engine), generated(original))
    else:
        with pytest.raises(UnsupportedCall, match=r"layers\.1 and \S*layers\.2 of this model have the same layer_idx"):
            generated(engine)
    assert torch.equal(generated(engine, use_cache=False), generated(original, use_cache=False))
    if name == "llama":  # the original's answer is another one with a cache, and Mistral's raises an error of sizes
        assert not torch.equal(generated(original), generated(original, use_cache=False))


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_numbered_copies_run(name: str) -> None:
    engine = infuse.init_inference(upscaled(name, numbered=True), dtype="fp32", progress=False)
    assert not any("layer_idx" in note for note in engine.plan.notes)
    assert torch.equal(generated(engine), generated(upscaled(name, numbered=True)))


def test_a_layer_in_two_places_is_told_in_the_plan() -> None:
    model: Any = BY_NAME["llama"].make()
    model.model.layers.insert(2, model.model.layers[1])
    model.config.num_hidden_layers = 4
    notes = infuse.plan(model, dtype="fp32").notes
    assert any("model.layers.1 and model.layers.2 have the same layer_idx 1" in note for note in notes), notes


def test_a_layer_that_is_copied_afterwards_is_another_to_a_cache() -> None:
    model: Any = infuse.init_inference(BY_NAME["llama"].make(), dtype="fp32", progress=False).module
    model.model.layers.insert(2, copy.deepcopy(model.model.layers[1]))
    with pytest.raises(UnsupportedCall, match=r"layers\.1 and a copy of model\.layers\.1 of this model have the same"):
        generated(model)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_goes_on_with_its_cache(copied: Any) -> None:
    model: Any = infuse.init_inference(BY_NAME["llama"].make(), dtype="fp32", progress=False).module
    first = generated(model, return_dict_in_generate=True)
    again = copied(model)
    wanted = BY_NAME["llama"].make().generate(first.sequences, max_new_tokens=3, do_sample=False)
    assert torch.equal(again.generate(first.sequences, cache=first.cache, max_new_tokens=3, do_sample=False), wanted)


def test_lists_of_layers_with_numbers_of_their_own_are_no_copies() -> None:
    """The encoder's and the decoder's layers are counted from 0 each."""
    for name in ("bart", "t5"):
        plan = infuse.plan(encoder_decoders.made(encoder_decoders.BY_NAME[name]), dtype="fp32")
        assert not any("layer_idx" in note for note in plan.notes), plan.notes
