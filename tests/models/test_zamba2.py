"""Zamba2: its state spaces become blocks, also in the layers whose shared block of attention and MLP stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import DynamicCache

import infuse
from infuse.cache.hybrid_slot import HybridSlot
from infuse.cache.kv_cache import KVCache
from infuse.cache.recurrence_slot import StateSlot
from infuse.layers.block import Block
from infuse.layers.native.one_call import StepCall
from infuse.native import kernels
from tests.models.families import ZAMBA2, inputs
from tests.support.one_calls import calls_noted
from tests.support.ranks import Ranks, same

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": dict(num_beams=3),
    "sampling": dict(do_sample=True, top_k=20),
    "in parts": dict(prefill_chunk_size=4),
    "without a cache": dict(use_cache=False),
    "static": dict(cache_implementation="static"),
}


@pytest.fixture(scope="module")
def engine() -> infuse.InferenceEngine:
    return infuse.init_inference(ZAMBA2.make(), dtype="fp32", replace_with_kernel_inject=True)


def test_each_state_space_is_a_block_and_plain_ones_run_in_one_call(
    engine: infuse.InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = [path for path, module in engine.module.named_modules() if isinstance(module, Block)]
    wanted = ["model.layers.0", "model.layers.1.mamba_decoder", "model.layers.2", "model.layers.3.mamba_decoder"]
    assert blocks == wanted
    if isinstance(kernels(), str):
        return
    taken = calls_noted(StepCall, monkeypatch)
    engine.generate(**inputs(ZAMBA2), max_new_tokens=3, do_sample=False)
    assert taken == [False] * 4 + [True, False] * 4  # the prompt, and two steps


@pytest.mark.parametrize("mode", MODES)
def test_generated_tokens(mode: str, engine: infuse.InferenceEngine) -> None:
    given, original = inputs(ZAMBA2, tokens=9, padding="left", seed=4), ZAMBA2.make()
    torch.manual_seed(5)
    wanted = original.generate(**given, max_new_tokens=8, **MODES[mode])  # type: ignore[operator]
    torch.manual_seed(5)
    assert torch.equal(engine.generate(**given, max_new_tokens=8, **MODES[mode]), wanted)


@pytest.mark.parametrize("ours", [True, False])
def test_steps_on_a_cache(ours: bool, engine: infuse.InferenceEngine) -> None:
    original: Any = ZAMBA2.make()
    ids = inputs(ZAMBA2, tokens=12)["input_ids"]
    cache, own = KVCache() if ours else DynamicCache(config=original.config), DynamicCache(config=original.config)
    for start, stop in ((0, 7), (7, 10), (10, 11), (11, 12)):
        with torch.no_grad():
            wanted = original(ids[:, start:stop], past_key_values=own).logits
            found = engine(ids[:, start:stop], past_key_values=cache).logits
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)
    if isinstance(cache, KVCache):
        assert [type(slot) for slot in cache.layers] == [StateSlot, HybridSlot] * 2
        assert {place: type(slot) for place, slot in cache.more.items()} == {
            (1, "mamba"): StateSlot,
            (3, "mamba"): StateSlot,
        }


@torch.no_grad()
def logits(model: Any, seed: int = 1) -> Tensor:
    """At the tokens that are not padding."""
    given = inputs(ZAMBA2, padding="left", seed=seed)
    return model(**given, use_cache=False).logits[given["attention_mask"].bool()].float()


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["int8:16", "int4:16"])
def test_formats(quant: str) -> None:
    """The numbers are those of the original with rounded weights, those of shared blocks included."""
    engine, original = infuse.init_inference(ZAMBA2.make(), dtype="fp32", quant=quant), ZAMBA2.make()
    formats = [step.formats for step in engine.plan.steps if step.depth == "block"]
    assert formats == [{"mamba.in.weight": quant, "mamba.out.weight": quant}] * 4
    with infuse.dequantized(engine):
        original.load_state_dict(engine.module.state_dict())
    torch.testing.assert_close(logits(engine), logits(original), rtol=1e-4, atol=1e-4)


def on_rank() -> tuple[Tensor, Tensor, int]:
    size = {"tp_size": dist.get_world_size()}
    engine = infuse.init_inference(ZAMBA2.make(), dtype="fp32", progress=False, tensor_parallel=size)
    count = sum(isinstance(module, Block) for module in engine.module.modules())
    return logits(engine), engine.generate(**inputs(ZAMBA2), max_new_tokens=5, do_sample=False), count


@pytest.mark.slow
def test_ranks_share_the_state_spaces(ranks: Ranks) -> None:
    found = ranks.run(2, on_rank)
    original: Any = ZAMBA2.make()
    assert same([first for first, *_ in found])
    torch.testing.assert_close(found[0][0], logits(original), rtol=2e-5, atol=2e-5)
    tokens = original.generate(**inputs(ZAMBA2), max_new_tokens=5, do_sample=False)
    assert all(torch.equal(own, tokens) and count == 4 for _, own, count in found)


@pytest.mark.slow
def test_errors_in_bf16_are_at_most_twice_the_originals() -> None:
    """Aggregated over inputs: of one alone, they vary by more than the factor that is tested."""
    exact = ZAMBA2.make()
    engine, original = infuse.init_inference(ZAMBA2.make(), dtype="bf16"), ZAMBA2.make().bfloat16()
    assert sum(isinstance(module, Block) for module in engine.module.modules()) == 4
    errors = torch.zeros(2)
    for seed in range(6):
        wanted = logits(exact, seed)
        errors += torch.stack([(logits(model, seed) - wanted).square().sum() for model in (engine, original)])
    assert 0 < errors[0] <= 4 * errors[1]  # of squares
