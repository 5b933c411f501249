"""kv_cache="int8": the cache's rows, generate in every mode over them, the plan, and the proof."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

import infuse
from infuse import ops
from infuse.cache.kv_cache import KVCache
from infuse.cache.slot import KVSlot
from infuse.ops.cache_rows import LARGEST_CODE, SCALE_BYTES, dequantize_rows, quantize_rows
from tests.models.families import BY_NAME, inputs
from tests.support.ranks import Ranks
from tests.support.side_by_side import assert_close, logits

NEW = 9
NAMES = ("llama", "gpt2", "bloom", "mistral", "gemma2", "gpt-oss")
MODES: dict[str, dict[str, Any]] = {
    "greedy": dict(do_sample=False),
    "samples": dict(do_sample=True, top_k=12, num_return_sequences=2),
    "beams": dict(num_beams=3, num_return_sequences=2),
}


def rounded(values: Tensor) -> Tensor:
    return dequantize_rows(quantize_rows(values))


def made(name: str, **keys: Any) -> tuple[nn.Module, infuse.InferenceEngine]:
    """The original, and an engine with an int8 cache, both in float32."""
    family = BY_NAME[name]
    engine = infuse.init_inference(family.make(), dtype="fp32", kv_cache="int8", **keys)
    assert engine.plan.kv_cache == "int8"
    return family.make(), engine


def generated(model: Any, given: dict[str, Tensor], **asked: Any) -> Tensor:
    torch.manual_seed(5)
    return model.generate(**given, **{"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0, **asked})


# ---- rows ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_value_comes_back_within_half_a_step(dtype: torch.dtype) -> None:
    values = (torch.randn(3, 2, 5, 33) * torch.logspace(-3, 2, 5)[:, None]).to(dtype)
    values[0, 0, 0] = 0
    rows = quantize_rows(values)
    assert rows.dtype == torch.int8 and rows.shape == (3, 2, 5, 33 + SCALE_BYTES)
    step = values.float().abs().amax(-1, keepdim=True) / LARGEST_CODE
    assert bool(((dequantize_rows(rows) - values.float()).abs() <= 0.5001 * step).all())
    assert torch.equal(quantize_rows(rounded(values)), rows)
    assert rounded(values[:, :, :0]).shape == (3, 2, 0, 33)


def test_a_cache_gives_rounded_values_whatever_is_done_to_it() -> None:
    """The same operations on a cache of float32 that is given values which are rounded already."""
    coded, plain = KVCache(format="int8"), KVCache()
    generator = torch.Generator().manual_seed(0)

    def both(act: str, *args: Any) -> None:
        for cache in (coded, plain):
            getattr(cache, act)(*args)

    def update(tokens: int) -> None:
        batch = 2 if not plain.layers else len(plain.layers[0].key_storage)
        for layer in range(2):
            states = [torch.randn(batch, 2, tokens, 6, generator=generator) for _ in "kv"]
            found, wanted = coded.update(*states, layer), plain.update(*map(rounded, states), layer)
            assert all(map(torch.equal, found, wanted))

    update(5)
    both("reorder_cache", torch.tensor([1, 1]))
    update(70)
    both("crop", -3)
    both("batch_repeat_interleave", 2)
    update(1)
    both("batch_select_indices", torch.tensor([0, 3]))
    both("crop_rows", torch.tensor([40, 72]))
    update(2)
    coded = copy.deepcopy(coded)
    assert torch.equal(coded.layers[1].keys, plain.layers[1].keys)
    assert torch.equal(coded.layers[1].values, plain.layers[1].values)
    assert coded.nbytes() * 6 * 4 == plain.nbytes() * (6 + SCALE_BYTES)
    other = KVSlot(format="int8")
    other.take(coded.layers[0])
    assert torch.equal(other.keys, coded.layers[0].keys) and other.length == coded.layers[0].length
    with pytest.raises(infuse.UnsupportedCall, match="2 heads of 6 in torch.float32"):
        coded.update(*(torch.zeros(2, 2, 1, 6).bfloat16() for _ in "kv"), 0)


# ---- generate ----


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_generate_is_the_originals_over_the_same_cache(name: str, mode: str) -> None:
    """transformers' layers read the dequantized values of an int8 cache. The first row is padded on the left."""
    original, engine = made(name)
    given = inputs(BY_NAME[name], batch=2, tokens=11, padding="left", seed=11)
    exact = generated(original, given, past_key_values=KVCache(format="int8"), **MODES[mode])
    assert torch.equal(generated(engine, given, **MODES[mode]), exact)


def test_lookup_crops_and_a_second_turn_goes_on() -> None:
    original, engine = made("llama")
    given = {"input_ids": torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])}
    exact = generated(original, given, past_key_values=KVCache(format="int8"))
    assert torch.equal(generated(engine, given, prompt_lookup_num_tokens=3), exact)
    first = generated(engine, given, return_dict_in_generate=True)
    cache = first.past_key_values
    assert isinstance(cache, KVCache) and cache.layers[0].key_storage.dtype == torch.int8
    whole = torch.cat((first.sequences, torch.tensor([[9, 4]])), dim=1)
    again = KVCache(format="int8")
    assert torch.equal(
        generated(engine, {"input_ids": whole}, past_key_values=cache),
        generated(original, {"input_ids": whole}, past_key_values=again),
    )


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_few_and_many_tokens_agree_in_bfloat16(name: str) -> None:
    """Decode steps, several tokens and a whole prompt read the same rows by different kernels."""
    engine = infuse.init_inference(BY_NAME[name].make(), dtype="bf16", kv_cache="int8")
    ids = torch.randint(3, 96, (2, 40), generator=torch.Generator().manual_seed(1))
    whole, cache = logits(engine, ids, past_key_values=KVCache(format="int8")), KVCache(format="int8")
    parts = [logits(engine, part, past_key_values=cache) for part in ids.split((25, 1, 1, 3, 10), dim=1)]
    error = (torch.cat(parts, dim=1) - whole).float().square().mean().sqrt() / whole.float().square().mean().sqrt()
    assert float(error) < 0.02


def test_users_own_caches_keep_their_dtype() -> None:
    original, engine = made("llama")
    given = inputs(BY_NAME["llama"], batch=2, tokens=7, padding="left", seed=2)
    exact = generated(original, given)
    for cache in (DynamicCache(), StaticCache(config=original.config, max_cache_len=30)):
        assert torch.equal(generated(engine, given, past_key_values=cache), exact)
    assert torch.equal(generated(engine, given, cache_implementation="static"), exact)


def test_attention_weights_and_rows_of_different_lengths() -> None:
    original, engine = made("llama")
    original.set_attn_implementation("eager")
    ids = torch.randint(3, 96, (2, 7), generator=torch.Generator().manual_seed(3))
    engine.module.set_attn_implementation("eager")
    with torch.no_grad():
        found = engine(ids, past_key_values=KVCache(format="int8"), output_attentions=True)
        exact = original(ids, past_key_values=KVCache(format="int8"), output_attentions=True)
    for a, b in zip((found.logits, *found.attentions), (exact.logits, *exact.attentions), strict=True):
        assert_close(a, b)
    cache, lengths = KVCache(format="int8"), torch.tensor([4, 7])
    with torch.no_grad():
        engine(ids, past_key_values=cache)
        cache.crop_rows(lengths)
        ragged = engine(ids[:, :1], past_key_values=cache, position_ids=lengths[:, None]).logits[:, -1]
        alone = torch.cat((ids[0, :4], ids[0, :1]))[None]
        assert_close(ragged[0], original(alone, past_key_values=KVCache(format="int8")).logits[0, -1])


# ---- plan and proof ----


def test_what_the_plan_says() -> None:
    model = BY_NAME["llama"].make()
    text = str(infuse.plan(model, dtype="bf16", kv_cache="int8"))
    width, heads, layers = (
        getattr(model.config, name) for name in ("head_dim", "num_key_value_heads", "num_hidden_layers")
    )
    plain, held = (2 * heads * layers * count / 1e3 for count in (2 * width, width + SCALE_BYTES))
    assert f"cache  int8, {held:,.1f} kB a token instead of {plain:,.1f} kB in bfloat16; caches that you pass" in text
    assert "cache: keys and values that generate keeps" in text
    plans = [infuse.plan(model, dtype="bf16", **keys) for keys in ({}, {"kv_cache": None}, {"kv_cache": "int8"})]
    assert plans[0].digest() == plans[1].digest() != plans[2].digest()
    assert "int8" not in str(plans[0])


def test_without_decoder_blocks_it_has_no_effect() -> None:
    for name, keys in (("bert", {}), ("llama", {"replace_with_kernel_inject": False})):
        plan = infuse.plan(BY_NAME[name].make(), kv_cache="int8", **keys)
        assert "kv_cache: no effect here: no decoder layer is replaced as a block" in str(plan)
        assert plan.kv_cache is None


def test_other_formats_are_refused() -> None:
    with pytest.raises(infuse.ConfigError, match="kv_cache: found 'int4'"):
        infuse.InferenceConfig(kv_cache="int4")


def test_kernels_that_read_rows_wrongly_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block falls back, though it is right over a cache of floats."""
    for name in ("cpu", "torch"):
        body = ops.attention.bodies[name]

        def wrong(q: Tensor, k: Tensor, v: Tensor, *rest: Any, right: Any = body.function) -> Tensor:
            return right(q, k, v, *rest) * (1.5 if k.dtype == torch.int8 else 1.0)

        monkeypatch.setitem(ops.attention.bodies, name, replace(body, function=wrong))
    engine = infuse.init_inference(BY_NAME["llama"].make(), dtype="bf16", kv_cache="int8")
    assert "our int8 cache" in str(engine.plan) and all(step.depth != "block" for step in engine.plan.steps)
    assert infuse.init_inference(BY_NAME["llama"].make(), dtype="bf16").plan.steps[0].depth == "block"


# ---- ranks ----


def generated_on_rank() -> Tensor:
    engine = infuse.init_inference(BY_NAME["llama"].make(), dtype="fp32", mp_size=2, kv_cache="int8")
    return generated(engine, inputs(BY_NAME["llama"], padding="left"), num_beams=3)


def test_ranks_keep_the_rows_of_their_heads(ranks: Ranks) -> None:
    results = ranks.run(2, generated_on_rank)
    given = inputs(BY_NAME["llama"], padding="left")
    exact = generated(BY_NAME["llama"].make(), given, num_beams=3, past_key_values=KVCache(format="int8"))
    assert all(torch.equal(result, exact) for result in results)
