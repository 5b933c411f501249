"""Models of selective scans alone, or of state spaces alone: no layer has an MLP, no layer of the cache counts tokens,
and masks are of the new tokens. In 16 bits sums are in float32 if the config says so.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

import infuse
from infuse.cache.kv_cache import KVCache
from infuse.generate import loop
from infuse.generate.direct import DirectSteps
from infuse.ground.cache_names import cache_argument
from infuse.layers.block import Block
from infuse.layers.native.one_call import StepCall
from infuse.layers.native.stack import DecodeSession
from infuse.native import kernels
from tests.models.families import BY_NAME as OTHERS
from tests.models.families import JAMBA, MAMBA, inputs
from tests.support.one_calls import calls_noted, part_by_part
from tests.support.tolerance import assert_near

BY_NAME = {family.name: family for family in MAMBA}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {}, "sampling": dict(do_sample=True), "beams": dict(num_beams=3),
    "sampled beams": dict(do_sample=True, num_beams=2), "returned": dict(num_return_sequences=2, do_sample=True),
}  # fmt: skip
NEW_TOKENS = 9


@cache
def pair(name: str) -> tuple[nn.Module, infuse.InferenceEngine]:
    engine = infuse.init_inference(BY_NAME[name].make(), dtype="fp32", verify="strict")
    return BY_NAME[name].make(), engine


def run(model: Any, past: Cache | None = None, **given: Any) -> Any:
    named = (
        {cache_argument(type(getattr(model, "module", model)).forward) or "cache_params": past}
        if past is not None
        else {}
    )
    with torch.no_grad():
        return model(**given, **named)


def assert_close(found: Tensor, exact: Tensor) -> None:
    assert found.shape == exact.shape and found.dtype == exact.dtype
    assert ((found - exact).abs().max() / exact.square().mean().sqrt()).item() <= 1e-4


@pytest.mark.parametrize("name", BY_NAME)
def test_every_layer_is_a_block_without_an_mlp(name: str) -> None:
    _, engine = pair(name)
    held = [module for module in engine.module.modules() if isinstance(module, Block)]
    assert len(held) == 3 and all({*block.shape.parts} == {"mixer", "norm1"} for block in held)
    assert not any(left.why.startswith("refused") for left in engine.plan.left)
    assert ("linear_attention" if name.startswith("mamba2") else "selective_scan") in str(engine.plan)


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", BY_NAME)
def test_prompts(name: str, padding: str | None) -> None:
    given = inputs(BY_NAME[name], padding=padding)
    exact, found = (run(model, **given, output_hidden_states=True) for model in pair(name))
    real = given["attention_mask"].bool()
    assert_close(found.logits[real], exact.logits[real])
    for a, b in zip(found.hidden_states, exact.hidden_states, strict=True):
        assert_close(a[real], b[real])


@pytest.mark.parametrize("make", [DynamicCache, KVCache])
@pytest.mark.parametrize("name", BY_NAME)
def test_calls_on_a_cache(name: str, make: Any) -> None:
    """Several tokens begin a scan with no state, though its convolution goes on; so they do on our cache."""
    model, engine = pair(name)
    given = inputs(BY_NAME[name], tokens=14, padding="left", seed=3)
    own = DynamicCache(config=model.config)
    past = KVCache() if make is KVCache else DynamicCache(config=model.config)
    for start, stop in ((0, 7), (7, 8), (8, 9), (9, 12), (12, 13), (13, 14)):
        piece = dict(input_ids=given["input_ids"][:, start:stop])
        if not start:
            piece["attention_mask"] = given["attention_mask"][:, :stop]
        real = given["attention_mask"][:, start:stop].bool()
        exact, found = run(model, own, **piece), run(engine, past, **piece)
        assert_close(found.logits[real], exact.logits[real])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BY_NAME)
def test_generated_tokens(name: str, mode: str) -> None:
    results = []
    for model in pair(name):
        torch.manual_seed(5)
        given = inputs(BY_NAME[name], tokens=9, padding="left", seed=4)
        settings = {"do_sample": False, **MODES[mode]}
        results.append(model.generate(**given, max_new_tokens=NEW_TOKENS, **settings))
    assert torch.equal(*results)


@pytest.mark.parametrize("name", [*BY_NAME, "jamba"])
def test_long_prompts_run_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = BY_NAME.get(name) or OTHERS[name]
    given = inputs(family, tokens=19, padding="left")
    wanted = family.make().generate(**given, max_new_tokens=5, do_sample=False)
    engine = infuse.init_inference(family.make(), dtype="fp32")
    monkeypatch.setattr(loop, "PART_TOKENS", 4)
    assert torch.equal(engine.generate(**given, max_new_tokens=5, do_sample=False), wanted)


@pytest.mark.parametrize("name", BY_NAME)
def test_sums_in_bf16_models_are_as_wide_as_the_originals(name: str) -> None:
    """The errors of several models are aggregated: of one alone, they vary by more than the factor that is tested."""
    given, errors = inputs(BY_NAME[name], batch=3, tokens=9), torch.zeros(2)
    for seed in range(4):
        original = BY_NAME[name].make(seed).bfloat16()
        engine = infuse.init_inference(BY_NAME[name].make(seed).bfloat16(), dtype="bf16", verify="off")
        exact = run(BY_NAME[name].make(seed).bfloat16().float(), **given).logits
        results = [run(model, **given, output_hidden_states=True) for model in (engine, original)]
        wide = torch.bfloat16 if name.endswith("-narrow") else torch.float32
        assert all([h.dtype for h in result.hidden_states] == [wide] * 4 for result in results)
        errors += torch.stack([(result.logits - exact).square().mean() for result in results])
    assert errors[0] <= 1.5 * errors[1]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", BY_NAME)
def test_steps_go_in_one_call(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where sums are wide and norms are not; the states after ten steps are those of the same steps by parts."""
    model: Any = infuse.init_inference(BY_NAME[name].make(), dtype=dtype, verify="off").module
    ids = inputs(BY_NAME[name], batch=2, tokens=17)["input_ids"]
    found = []
    for way in (part_by_part(model), nullcontext()):
        cache = KVCache()
        with way:
            run(model, cache, input_ids=ids[:, :7], use_cache=True)
            taken = calls_noted(StepCall, monkeypatch)
            logits = [run(model, cache, input_ids=ids[:, at : at + 1], use_cache=True).logits for at in range(7, 17)]
        found.append([*logits, *(state for slot in cache.slots for state in slot.storages)])
    assert taken == [not isinstance(kernels(), str)] * 30
    for ours, parts in zip(*found, strict=True):
        assert ours.dtype == parts.dtype
        assert_near(ours, parts, model.dtype, times=4)  # small products are summed in another order


@pytest.mark.skipif(isinstance(kernels(), str), reason=str(kernels()))
@pytest.mark.parametrize("quant", [None, "int8"])
@pytest.mark.parametrize("name", BY_NAME)
def test_an_answer_goes_in_one_call_of_all_blocks(
    name: str, quant: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16, sums in float32 included: the norm of these is rounded for a head that is large enough for C++."""
    sizes: dict[str, Any] = dict(hidden_size=64, vocab_size=5000, tie_word_embeddings=False)
    sizes |= dict(num_heads=8) if name.startswith("mamba2") else dict(time_step_rank=16)
    model = BY_NAME[name].make(**sizes)
    engine = infuse.init_inference(model, dtype="bf16", verify="off", quant=quant)
    ids, steps = inputs(BY_NAME[name], batch=2, tokens=9)["input_ids"], []
    asked: dict[str, Any] = dict(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    own = DecodeSession.tokens
    monkeypatch.setattr(DecodeSession, "tokens", lambda self, *more: (out := own(self, *more), steps.append(out))[0])
    found = engine.generate(ids, **asked)
    assert steps and sum(out.shape[1] for out in steps) == NEW_TOKENS - 2  # after the prompt's, and a traced step
    monkeypatch.setattr(DirectSteps, "step_of", lambda *_: None)
    assert torch.equal(found, engine.generate(ids, **asked))


@pytest.mark.parametrize("quant", ["int8:16", "int4:16", "fp8"])
def test_formats(quant: str) -> None:
    model = BY_NAME["falcon_mamba"].make(hidden_size=64, time_step_rank=16)
    engine = infuse.init_inference(model, dtype="fp32", quant=quant, verify="strict")
    formats = [sorted(step.formats) for step in engine.plan.steps if step.depth == "block"]
    assert formats == [[f"mixer.{name}.weight" for name in ("dt", "in", "out", "x")]] * 3


@pytest.mark.parametrize("family", [*MAMBA, JAMBA[0]], ids=lambda family: family.name)
def test_another_activation_is_left(family: Any) -> None:
    engine = infuse.init_inference(family.make(hidden_act="relu"), dtype="fp32")
    assert any("only SiLU is understood" in left.why for left in engine.plan.left)
