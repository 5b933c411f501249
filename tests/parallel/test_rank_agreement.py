"""Ranks with different caches, settings or weights raise RankError on every rank."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as t
from torch import Tensor
from transformers.cache_utils import DynamicCache, StaticCache

import infuse
from infuse.cache.kv_cache import KVCache
from tests.models.families import BY_NAME, inputs
from tests.support.over_ranks import engine_of
from tests.support.ranks import Ranks, same


def told(errors: list[Any], what: str) -> bool:
    return all(
        isinstance(error, infuse.RankError) and f"{what}: rank 1 differs from rank 0" in str(error) for error in errors
    )


# ---- caches ----


def another_cache(kind: str, how: str) -> None:
    engine = engine_of("llama")
    ids = inputs(BY_NAME["llama"])["input_ids"]
    cache = {"ours": KVCache, "dynamic": DynamicCache, "static": lambda: StaticCache(engine.config, max_cache_len=40)}[
        kind
    ]()
    second = dist.get_rank() == 1
    with torch.no_grad():
        engine(ids, past_key_values=cache)
        if second and how == "crop":
            cache.crop(5 if kind == "ours" else -6)
        if second and how == "crop rows":
            cache.layers[0].crop_rows(torch.tensor([4, 11]))
        if second and how == "empty":
            cache.reset()
        engine(ids[:, -1:], past_key_values=cache)


@pytest.mark.parametrize(
    ("kind", "how"), [("ours", "crop"), ("ours", "crop rows"), ("dynamic", "crop"), ("static", "empty")]
)
def test_caches_that_differ_are_named_on_every_rank(kind: str, how: str, ranks: Ranks) -> None:
    assert told(ranks.run_expecting_errors(2, another_cache, kind, how), "the caches (tokens, rows, crops)")


# ---- generate ----


class Prefers(t.LogitsProcessor):
    """Adds to one token's score."""

    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, self.token] += 100
        return scores


class Until(t.StoppingCriteria):
    def __init__(self, tokens: int):
        self.tokens = tokens

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.tokens)


def other_generation(how: str) -> Tensor:
    second = dist.get_rank() == 1
    engine = engine_of("llama", max_out_tokens=60 if how == "cap" and second else 70)
    keys: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    if how == "own config" and second:
        engine.module.generation_config.repetition_penalty = 5.0
    if how == "given config":
        keys = {"generation_config": t.GenerationConfig(max_new_tokens=6, repetition_penalty=5.0 if second else 1.0)}
    if how in ("processor", "same"):
        keys["logits_processor"] = t.LogitsProcessorList([Prefers(7 if second and how == "processor" else 8)])
    if how in ("criterion", "same"):
        keys["stopping_criteria"] = [Until(14 if second and how == "criterion" else 15)]
    if how == "same":  # begun at different times
        keys["stopping_criteria"].append(
            t.MaxTimeCriteria(1000.0, initial_timestamp=torch.rand(1, dtype=torch.float64).item() + 4e9)
        )
        keys["stopping_criteria"][-1].initial_timestamp += dist.get_rank()
    return engine.generate(**inputs(BY_NAME["llama"]), **keys)


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("own config", "the generation configs"),
        ("given config", "the generation configs"),
        ("cap", "the caps on tokens"),
        ("processor", "the logits processors and stopping criteria"),
        ("criterion", "the logits processors and stopping criteria"),
    ],
)
def test_settings_of_generate_that_differ_are_named_on_every_rank(how: str, what: str, ranks: Ranks) -> None:
    assert told(ranks.run_expecting_errors(2, other_generation, how), what)


class Started(t.generation.BaseStreamer):
    """Tells when the first token comes."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def put(self, value: Tensor) -> None:
        self.event.set()

    def end(self) -> None:
        pass


def calls_of_two_threads() -> None:
    """The steps of two calls with equal shapes, which the ranks would add up crosswise."""
    engine = engine_of("llama")
    asked = dict(max_new_tokens=40, do_sample=False)
    prompts = [torch.arange(3 + i, 12 + i)[None] for i in range(2)]
    wanted = [engine.generate(prompt, **asked) for prompt in prompts]
    found: dict[int, Tensor] = {}

    def call(i: int, streamer: Started) -> None:
        found[i] = engine.generate(prompts[i], streamer=streamer, **asked)

    threads = []
    for i in range(2):  # in the same order on all ranks
        streamer = Started()
        threads.append(threading.Thread(target=call, args=(i, streamer)))
        threads[-1].start()
        streamer.event.wait(20 if i == 0 else 0)
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[i], wanted[i]) for i in range(2))


def test_calls_of_several_threads_take_turns(ranks: Ranks) -> None:
    ranks.run(2, calls_of_two_threads)


def masks_in_another_order() -> None:
    """As transformers makes them for a static cache: the order of a set of words differs between processes."""
    names = ["full_attention", "sliding_attention"][:: -1 if dist.get_rank() else 1]
    causal = torch.ones(4, 4, dtype=torch.bool).tril()[None, None]
    engine_of("gemma2")(torch.arange(4)[None], attention_mask=dict.fromkeys(names, causal), use_cache=False)


def test_masks_by_name_may_come_in_any_order(ranks: Ranks) -> None:
    ranks.run(2, masks_in_another_order)


def test_equal_processors_and_criteria_are_no_error(ranks: Ranks) -> None:
    assert same(ranks.run(2, other_generation, "same"))


# ---- weights ----


def other_weights(how: str, keys: dict[str, Any]) -> None:
    model: Any = BY_NAME["llama"].make(seed=1 if how == "seed" and dist.get_rank() == 1 else 0)
    if dist.get_rank() == 1:
        with torch.no_grad():
            if how == "value":
                model.model.layers[2].mlp.up_proj.weight[3, 5] += 1e-3
            if how == "order":
                weight = model.model.layers[1].self_attn.q_proj.weight
                weight.copy_(weight.flip(0))
            if how == "frequencies":
                model.model.rotary_emb.inv_freq *= 1.01
            if how == "config":
                model.config.rms_norm_eps = 0.5
    infuse.init_inference(model, dtype="fp32", progress=False, tensor_parallel={"tp_size": 2}, **keys)


@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("seed", "the weights: model.embed_tokens.weight"),
        ("value", "the weights: model.layers.2.mlp.up_proj.weight"),
        ("order", "the weights: model.layers.1.self_attn.q_proj.weight"),
        ("config", "the model's config"),
        ("frequencies", "the weights: model.rotary_emb.inv_freq"),
    ],
)
def test_models_that_differ_are_named_without_a_proof(how: str, where: str, ranks: Ranks) -> None:
    assert told(ranks.run_expecting_errors(2, other_weights, how, {"verify": "off"}), where)


def loading_another(folder: str, keys: dict[str, Any]) -> None:
    infuse.init_inference(
        BY_NAME["llama"].make(),
        checkpoint=f"{folder}/{dist.get_rank()}",
        dtype="fp32",
        progress=False,
        verify="off",
        tensor_parallel={"tp_size": 2},
        **keys,
    )


def test_checkpoints_that_differ_are_named_on_every_rank(tmp_path: Path, ranks: Ranks) -> None:
    """As with an adapter that was merged on one host: norms, embeddings and headers are the same."""
    model: Any = BY_NAME["llama"].make()
    model.save_pretrained(tmp_path / "0")
    with torch.no_grad():
        model.model.layers[1].mlp.gate_proj.weight += 1e-3
    model.save_pretrained(tmp_path / "1")
    errors = ranks.run_expecting_errors(2, loading_another, str(tmp_path), {})
    assert told(errors, "the weights: model.layers.1.mlp.gate_proj.weight")


def test_equal_checkpoints_in_other_places_are_no_error(tmp_path: Path, ranks: Ranks) -> None:
    for rank in range(2):
        BY_NAME["llama"].make().save_pretrained(tmp_path / str(rank))
    ranks.run(2, loading_another, str(tmp_path), {"quant": "int8:4"})
