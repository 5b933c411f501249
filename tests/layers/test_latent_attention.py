"""Latent attention: caches in transformers' form, both ways to attend, rotations, and what is not quantized.

All that other families give too is in tests/models.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache
from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb, apply_rotary_pos_emb_interleave

import infuse
from infuse import ops
from infuse.architectures.parts.latent_attention import COMPLEX, HALVES, PAIRS
from infuse.cache.kv_cache import KVCache
from infuse.layers.attention.latent_attention import LatentAttention
from infuse.layers.block import Block
from infuse.layers.calls.inputs import Inputs
from tests.models.families import BY_NAME, LATENT, LATENT_MIXTURES, inputs
from tests.support.side_by_side import injected, pair
from tests.support.tolerance import assert_near

NAMES = [family.name for family in (*LATENT_MIXTURES, *LATENT)]
TOLERANCE = 2e-5


def parts(engine: infuse.InferenceEngine) -> list[Any]:
    return [module for module in engine.module.modules() if isinstance(module, LatentAttention)]


@torch.no_grad()
def step(model: Any, ids: Tensor, cache: Any, **more: Any) -> Tensor:
    """The logits of new tokens on a cache, which grows."""
    return model(input_ids=ids, past_key_values=cache, use_cache=True, **more).logits


def close(found: Tensor, exact: Tensor) -> None:
    assert found.shape == exact.shape
    assert float((found - exact).abs().max() / exact.square().mean().sqrt()) < TOLERANCE


# ---- caches


@pytest.mark.parametrize("name", NAMES)
def test_each_continues_from_a_cache_that_the_other_filled(name: str) -> None:
    model, engine = pair(name)
    ids = inputs(BY_NAME[name], tokens=12)["input_ids"]
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    close(step(engine, ids[:, :7], caches[1]), step(model, ids[:, :7], caches[0]))
    for layer, other in zip(*(cache.layers for cache in caches), strict=True):
        assert layer.keys.shape == (2, 1, 7, 24) and layer.values.shape == (2, 1, 7, 4)
        close(other.keys, layer.keys), close(other.values, layer.values)
    close(step(engine, ids[:, 7:10], caches[0]), step(model, ids[:, 7:10], caches[1]))
    close(step(engine, ids[:, 10:11], caches[1]), step(model, ids[:, 10:11], caches[0]))


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2"])
@pytest.mark.parametrize("ours", [False, True])
def test_crop_and_reorder(name: str, ours: bool) -> None:
    model, engine = pair(name)
    ids = inputs(BY_NAME[name], tokens=12)["input_ids"]
    caches = DynamicCache(config=model.config), KVCache() if ours else DynamicCache(config=model.config)
    for cache, each in zip(caches, (model, engine), strict=True):
        step(each, ids[:, :9], cache)
        cache.crop(-3)
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.batch_repeat_interleave(2)
    again = ids.flip(0).repeat_interleave(2, dim=0)
    close(step(engine, again[:, 6:7], caches[1]), step(model, again[:, 6:7], caches[0]))
    whole = step(model, again[:, :8], DynamicCache(config=model.config))
    close(step(engine, again[:, 7:8], caches[1]), whole[:, 7:8])


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2-lite", "minicpm3"])
@pytest.mark.parametrize("first", [1, 11])  # tokens that attend to latents, and to expanded heads
def test_static_caches(name: str, first: int) -> None:
    model, engine = pair(name)
    ids = inputs(BY_NAME[name], tokens=14)["input_ids"]
    caches = [StaticCache(config=model.config, max_cache_len=20) for _ in range(2)]
    for begin, end in ((0, first), (first, first + 2), (first + 2, first + 3)):
        found, exact = (
            step(each, ids[:, begin:end], cache) for each, cache in zip((engine, model), caches, strict=True)
        )
        close(found, exact)


def test_rows_of_different_lengths() -> None:
    model, engine = pair("deepseek-v3")
    ids, cache = inputs(BY_NAME["deepseek-v3"], tokens=9)["input_ids"], KVCache()
    step(engine, ids[:, :7], cache)
    cache.crop_rows(torch.tensor([4, 7]))
    found = step(engine, ids[:, 7:8], cache, position_ids=torch.tensor([[4], [7]]))
    for row, length in enumerate((4, 7)):
        whole = torch.cat((ids[row : row + 1, :length], ids[row : row + 1, 7:8]), dim=1)
        close(found[row : row + 1], step(model, whole, DynamicCache(config=model.config))[:, -1:])


def test_an_int8_cache() -> None:
    """Its rounding alone separates it from the exact cache."""
    name = "deepseek-v3"
    ids = inputs(BY_NAME[name], tokens=12)["input_ids"]
    engine, cache = pair(name)[1], KVCache(format="int8")
    exact = KVCache()
    for begin, end in ((0, 9), (9, 10)):
        found, wanted = step(engine, ids[:, begin:end], cache), step(engine, ids[:, begin:end], exact)
        error = float((found - wanted).norm() / wanted.norm())
        assert error < 0.05
    assert error > 0 and cache.nbytes() < exact.nbytes()


# ---- both ways to attend


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("padding", [None, "left"])
def test_latents_and_expanded_heads_give_the_same(name: str, padding: str | None) -> None:
    model, engine = pair(name)
    given = inputs(BY_NAME[name], padding=padding)
    real = given["attention_mask"].bool()
    limits = [part._most_absorbed for part in parts(engine)]
    try:
        for limit in (0, 1 << 30):
            for part in parts(engine):
                part._most_absorbed = limit
            with torch.no_grad():
                close(engine(**given).logits[real], model(**given).logits[real])
    finally:
        for part, limit in zip(parts(engine), limits, strict=True):
            part._most_absorbed = limit


def test_a_hook_on_the_expansion_is_called() -> None:
    model, engine = pair("youtu")
    heard: list[Tensor] = []
    handle = parts(engine)[0].kv_b.register_forward_hook(lambda module, args, out: heard.append(out))
    try:
        given = inputs(BY_NAME["youtu"], tokens=1)
        with torch.no_grad():
            close(engine(**given).logits, model(**given).logits)
    finally:
        handle.remove()
    assert len(heard) == 1


@pytest.mark.parametrize("tokens", [1, 11])
def test_attention_weights(tokens: int) -> None:
    model, engine = BY_NAME["deepseek-v3"].make(), injected(BY_NAME["deepseek-v3"].make())
    for each in (model, engine.module):
        each.set_attn_implementation("eager")
    given = inputs(BY_NAME["deepseek-v3"], tokens=tokens)
    with torch.no_grad():
        exact, found = (each(**given, output_attentions=True) for each in (model, engine))
    assert len(found.attentions) == 3
    for ours, theirs in zip(found.attentions, exact.attentions, strict=True):
        close(ours, theirs)


def test_the_op_attends_as_expanded_heads_do() -> None:
    for case in ops.latent_attention.case_maker(torch.float32, torch.device("cpu")):  # type: ignore[misc]
        q, turned, latents, keys, expand, mask, scale, causal = case.args
        heads, plain = q.shape[2:]
        made = (latents @ expand.t()).unflatten(-1, (heads, -1)).transpose(1, 2)
        k = torch.cat((made[..., :plain], keys[:, None].expand(-1, heads, -1, -1)), dim=-1)
        v = made[..., plain:]
        scores = ops.attention_weights(
            torch.cat((q, turned), dim=-1).transpose(1, 2), k, mask, None, scale, causal, 0, 0.0
        )
        assert_near(ops.latent_attention(*case.args), (scores @ v).transpose(1, 2), torch.float32, case.label)


# ---- rotations


@pytest.mark.parametrize(("name", "rotation"), [("minicpm3", HALVES), ("deepseek-v3", PAIRS), ("deepseek-v2", COMPLEX)])
def test_rotations_are_those_of_transformers(name: str, rotation: str) -> None:
    part = parts(pair(name)[1])[0]
    assert part.shape.rotation == rotation
    q, k, angles = torch.randn(2, 5, 4, 4), torch.randn(2, 5, 1, 4), torch.rand(1, 5, 2) * 6
    both = torch.cat((angles, angles), dim=-1)
    cos_sin: Any = both.cos(), both.sin()
    turn = {HALVES: apply_rotary_pos_emb, PAIRS: apply_rotary_pos_emb_interleave, COMPLEX: apply_rotary_emb}[rotation]
    passed = (torch.polar(torch.ones_like(angles), angles),) if rotation == COMPLEX else cos_sin
    given: Any = passed[0] if rotation == COMPLEX else cos_sin
    found = part._rotated(q, k, _inputs(given))
    for ours, theirs in zip(found, turn(q.transpose(1, 2), k.transpose(1, 2), *passed), strict=True):  # type: ignore[operator]
        assert_near(ours, theirs.transpose(1, 2), torch.float32)
    with pytest.raises(infuse.UnsupportedCall, match="pass what the model passes"):
        part._rotated(q, k, _inputs(cos_sin if rotation == COMPLEX else torch.ones(1, 5, 2)))


def _inputs(position_embeddings: Any) -> Inputs:
    return Inputs(None, None, position_embeddings, None, None, None, False, 4)


# ---- formats and plans


@pytest.mark.parametrize("format", ["int8:8", "int4:4"])
@pytest.mark.parametrize("name", ["deepseek-v3", "minicpm3"])
def test_all_matrices_but_the_expansion_are_quantized(name: str, format: str) -> None:
    engine = infuse.init_inference(BY_NAME[name].make(), dtype="fp32", quant=format)
    blocks = [step for step in engine.plan.steps if step.depth == "block"]
    for one in blocks:
        ours = {target for target in one.formats if target.startswith("self_attn.")}
        assert ours == {f"self_attn.{matrix}.weight" for matrix in ("q_a", "q", "kv_a", "out")}
    assert "self_attn.kv_b.weight: in torch.float32: the few tokens of a step" in str(engine.plan)
    model = BY_NAME[name].make()
    with infuse.dequantized(engine.module):
        model.load_state_dict(engine.module.state_dict())
    ids = inputs(BY_NAME[name])["input_ids"]
    cache = KVCache(), DynamicCache(config=model.config)
    for begin, end in ((0, 9), (9, 10)):
        close(step(engine, ids[:, begin:end], cache[0]), step(model, ids[:, begin:end], cache[1]))


def test_the_state_dict_is_the_originals() -> None:
    for name in NAMES:
        model, engine = pair(name)
        wanted, found = model.state_dict(), engine.module.state_dict()
        assert list(found) == list(wanted)
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("name", ["DeepseekV32", "GlmMoeDsa"])
def test_layers_with_an_indexer_are_left_and_the_plan_says_why(name: str) -> None:
    config: Any = getattr(t, f"{name}Config")
    values = dict(BY_NAME["deepseek-v3"].values, index_n_heads=2, index_head_dim=16, index_topk=4)
    with torch.device("meta"):
        model: nn.Module = getattr(t, f"{name}ForCausalLM")(config(**values))
    plan = infuse.plan(model, dtype="fp32")
    assert "self_attn.indexer chooses the keys that each query sees" in str(plan)
    assert not any(isinstance(one, Block) or one.depth == "block" for one in plan.steps)
