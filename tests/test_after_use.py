"""Objects used too late or with another model: an engine after destroy(), a cache that another model filled."""

from __future__ import annotations

import pytest
import torch
from families import BY_NAME, inputs
from torch import nn

import infuse
from infuse.errors import InfuseError, UnsupportedCall
from infuse.layers.cache import KVCache


def filled(cache: KVCache, dtype: str, **changes: int) -> tuple[KVCache, nn.Module]:
    model = infuse.init_inference(BY_NAME["llama"].make(**changes), dtype=dtype).module
    with torch.no_grad():
        model(**inputs(BY_NAME["llama"]), past_key_values=cache, use_cache=True)
    return cache, model


@pytest.mark.parametrize("rows", [None, torch.tensor([4, 11])])
@pytest.mark.parametrize(("first", "then"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_a_cache_of_another_dtype_is_refused(first: str, then: str, rows: torch.Tensor | None) -> None:
    cache, _ = filled(KVCache(), first)
    if rows is not None:
        cache.crop_rows(rows)
    model = infuse.init_inference(BY_NAME["llama"].make(), dtype=then).module
    before = [held.clone() for slot in cache.layers for held in slot.held()]
    for tokens in (1, 3):
        with pytest.raises(UnsupportedCall, match=r"past_key_values: .*float.*float"), torch.no_grad():
            model(torch.ones(2, tokens, dtype=torch.long), past_key_values=cache, use_cache=True)
    after = [held for slot in cache.layers for held in slot.held()]
    assert cache.get_seq_length() == 11 and all(map(torch.equal, before, after)), "and stays as it was"


def test_a_cache_of_another_model_is_refused() -> None:
    cache, _ = filled(KVCache(), "fp32")
    other = infuse.init_inference(BY_NAME["llama"].make(num_key_value_heads=4), dtype="fp32").module
    with pytest.raises(UnsupportedCall, match="past_key_values: .* 2 heads of 12 .* 4 heads of 12 "), torch.no_grad():
        other(torch.ones(2, 1, dtype=torch.long), past_key_values=cache, use_cache=True)


def test_a_cache_that_is_reset_serves_any_dtype() -> None:
    cache, _ = filled(KVCache(), "fp32")
    cache.reset()
    filled(cache, "bf16")
    assert {storage.dtype for storage in cache.storages()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_an_engine_after_destroy_says_so(name: str) -> None:
    engine = infuse.init_inference(BY_NAME[name].make(), dtype="fp32")
    given = inputs(BY_NAME[name])
    engine.destroy()
    engine.destroy()
    for call in (engine, engine.forward, engine.module):
        with pytest.raises(InfuseError, match=r"destroy\(\) freed the weights"):
            call(**given)
    if name == "llama":
        for generate in (engine.generate, engine.module.generate):
            with pytest.raises(InfuseError, match=r"destroy\(\) freed the weights"):
                generate(given["input_ids"], max_new_tokens=2)
    with pytest.raises(InfuseError, match=r"destroy\(\) freed the weights"), engine.profile():
        engine(**given)
    assert "replaced" in engine.report()
