"""Layers that borrow other layers' keys and values (Gemma 4): among originals, on caches, in formats and parts."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

import infuse
from infuse.cache.kv_cache import KVCache
from infuse.layers.attention import self_attention as attention
from infuse.layers.block import Block
from infuse.layers.mixture.router import NormedRouter
from infuse.layers.native.one_call import StepCall
from infuse.native import kernels
from tests.models.families import BY_NAME
from tests.support.one_calls import calls_noted, part_by_part
from tests.support.side_by_side import TOLERANCE, injected

NAMES = ("gemma4", "gemma4-unified")
LENDERS, BORROWERS = (0, 1), (2, 3)


def pair(name: str, **keys: Any) -> tuple[Any, Any]:
    original = BY_NAME[name].make()
    engine = infuse.init_inference(copy.deepcopy(original), **{"dtype": "fp32", **keys})
    assert all(isinstance(layer, Block) for layer in engine.module.model.layers)
    return original, engine.module


def ids(tokens: int = 13, batch: int = 2) -> Tensor:
    return torch.randint(3, 96, (batch, tokens), generator=torch.Generator().manual_seed(tokens))


@torch.no_grad()
def logits(model: Any, *prompts: Tensor, cache: Any = None) -> Tensor:
    """Logits of the prompts one after the other on a cache."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    return torch.cat([model(each, past_key_values=cache, use_cache=True).logits for each in prompts], dim=1)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kept", [LENDERS, BORROWERS, (0, 3), (1, 2)], ids=str)
def test_beside_originals(name: str, kept: tuple[int, ...]) -> None:
    original, model = pair(name)
    for index in kept:
        model.model.layers[index] = copy.deepcopy(original.model.layers[index])
    for parts in ((ids(),), (ids(), ids(1), ids(4))):
        assert error(logits(model, *parts), logits(original, *parts)) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_prompts_in_parts_on_every_cache(name: str) -> None:
    original, model = pair(name)
    parts = (ids(9), ids(5), ids(1), ids(3))
    wanted = logits(original, *parts)
    for cache in (DynamicCache(config=original.config), KVCache()):
        assert error(logits(model, *parts, cache=cache), wanted) < TOLERANCE


def test_a_cropped_cache() -> None:
    original, model = pair("gemma4")
    found = []
    for each, cache in ((original, DynamicCache()), (model, DynamicCache()), (model, KVCache())):
        logits(each, ids(9), cache=cache)
        cache.crop(-3)
        found.append(logits(each, ids(4), cache=cache))
    assert error(found[1], found[0]) < TOLERANCE and error(found[2], found[0]) < TOLERANCE


def test_an_int8_cache() -> None:
    original, model = pair("gemma4", kv_cache="int8")
    parts = (ids(9), ids(1), ids(1))
    cache = KVCache(format="int8")
    assert error(logits(model, *parts, cache=cache), logits(original, *parts)) < 0.05
    given = dict(max_new_tokens=6, do_sample=False)
    assert model.generate(ids(), **given).shape == original.generate(ids(), **given).shape


def test_what_is_lent_is_the_originals() -> None:
    original, model = pair("gemma4")
    lent = []
    for each in (original, model):
        with torch.no_grad():
            lent.append(each.model(ids(), return_shared_kv_states=True).shared_kv_states)
    assert lent[0].keys() == lent[1].keys() == {"sliding_attention", "full_attention"}
    for name in lent[0]:
        for a, b in zip(lent[1][name], lent[0][name], strict=True):
            assert a.shape == b.shape and error(a, b) < TOLERANCE


def test_the_proof_looks_at_what_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "values_of", lambda stored, dtype: stored * 1.5)
    with pytest.raises(infuse.ProofError, match=r"model\.layers\.[01]: .* what is lent"):
        infuse.init_inference(BY_NAME["gemma4"].make(), dtype="fp32", verify="strict")


def test_a_layer_that_lends_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention.Attention, "_rotated", attention.Attention._appended)
    with pytest.raises(infuse.ProofError, match=r"model\.layers\.[01]"):
        infuse.init_inference(BY_NAME["gemma4-dense"].make(), dtype="fp32", verify="strict")


def test_a_layer_names_what_it_lacks() -> None:
    _, model = pair("gemma4")
    layer, rotary = model.model.layers[2], model.model.rotary_emb
    x, own = torch.randn(1, 5, 48), torch.randn(1, 5, 16)
    turns = rotary(x, torch.arange(5)[None], "sliding_attention")
    for shared in (None, {}):
        with pytest.raises(infuse.UnsupportedCall, match="shared_kv_states"):
            layer(x, own, shared_kv_states=shared, position_embeddings=turns)
    states = torch.randn(1, 2, 5, 16)
    with pytest.raises(infuse.UnsupportedCall, match="per_layer_input"):
        layer(x, None, shared_kv_states={"sliding_attention": (states, states)}, position_embeddings=turns)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gemma4-experts", "gemma4-experts-inputs"])
def test_a_mixture_beside_the_mlp(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers return probabilities in float32, which transformers records; a step of C++ is what the parts compute."""
    original, engine = BY_NAME[name].make().to(dtype), injected(BY_NAME[name].make(), dtype=dtype)
    allowed, steps = TOLERANCE if dtype is torch.float32 else 0.5, []  # in 16 bits, other experts may be chosen
    taken = calls_noted(StepCall, monkeypatch)
    with torch.no_grad():
        found, exact = (model(ids(7), output_router_logits=True) for model in (engine, original))
        for ours, theirs in zip(found.router_logits, exact.router_logits, strict=True):
            assert ours.dtype == theirs.dtype == torch.float32 and ours.shape == theirs.shape == (14, 8)
            assert error(ours, theirs) < allowed
        for way in (nullcontext(), part_by_part(engine.module)):
            with way:
                past = KVCache()
                engine(ids(7), past_key_values=past, use_cache=True)
                steps.append(engine(ids(1), past_key_values=past, use_cache=True).logits)
    assert error(*steps) < (TOLERANCE if dtype is torch.float32 else 0.05)
    assert isinstance(kernels(), str) or taken[-4:] == [True] * 4


def test_a_mixture_keeps_what_its_spec_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a factor of the router the proof refuses each block, with it none."""
    for field in ("gain", "gains"):
        family, layer = BY_NAME["gemma4-experts"], NormedRouter._routes

        def without(self: NormedRouter, x: torch.Tensor, field: str = field, layer: Any = layer) -> Any:
            with torch.no_grad():
                kept = getattr(self, field).clone()
                getattr(self, field).fill_(1.0)
                try:
                    return layer(self, x)
                finally:
                    getattr(self, field).copy_(kept)

        monkeypatch.setattr(NormedRouter, "_routes", without)
        with pytest.raises(infuse.ProofError, match=r"model\.layers\.[0-3]: .*router"):
            infuse.init_inference(family.make(), dtype="fp32", verify="strict")
        monkeypatch.undo()


@pytest.mark.parametrize("name", ["gemma4", "gemma4-experts"])
def test_saved_shards_have_the_factors_of_layers(name: str, tmp_path: Path) -> None:
    """They are buffers of the original, so a model on meta has none to offer."""
    family = BY_NAME[name]
    saved = infuse.init_inference(family.make(), dtype="fp32", save_mp_checkpoint_path=str(tmp_path))
    with torch.device("meta"):
        empty = family.model(family.config(**family.values)).eval()
    loaded = infuse.init_inference(empty, dtype="fp32", checkpoint=str(tmp_path))
    factors = [float(layer.scalar.scalar) for layer in loaded.module.model.layers]
    assert all(factor != 1.0 for factor in factors)
    with torch.no_grad():
        assert torch.equal(loaded(ids()).logits, saved(ids()).logits)
