"""Faults that users of comparable libraries reported, in the words of the reports.

What is compared with is always transformers' own model with the same weights."""

from __future__ import annotations

import copy
import os
import random
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from torch import nn
from transformers.cache_utils import DynamicCache, StaticCache

import infuse
from infuse import native
from infuse.cache.kv_cache import KVCache
from infuse.layers.linear import QuantizedLinear
from tests.models.families import BY_NAME, inputs
from tests.support.forked import Program
from tests.support.side_by_side import TOLERANCE, assert_close, ids, injected, logits, pair

# ---- garbage text after injection: proven before the swap; RoPE, mask, scales come from the model's own inputs ----


def test_positions_are_the_models_own_even_after_injection() -> None:
    """RoPE comes from the model: frequencies that are changed, and positions that are passed, after it was injected,
    count.
    """
    original, engine = BY_NAME["llama"].make(), injected(BY_NAME["llama"].make())
    positions = torch.tensor([[3, 4, 9, 10, 30, 31, 70]])
    before = logits(original, ids(1, 7))
    for model in (original, engine):
        model.model.rotary_emb.inv_freq.mul_(0.3)
    exact = logits(original, ids(1, 7), position_ids=positions)
    assert float((exact - before).abs().max()) > 100 * TOLERANCE * float(before.abs().max())
    assert_close(logits(engine, ids(1, 7), position_ids=positions), exact)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gptj"])
def test_a_mask_of_the_caller_is_taken_as_it_is(name: str) -> None:
    """Four dimensions: which query sees which key. Two texts are packed in one row, and do not see each other."""
    original, engine = pair(name)
    text = torch.tensor([0] * 4 + [1] * 5)
    allowed = ((text[:, None] == text[None, :]) & torch.ones(9, 9).bool().tril())[None, None]
    mask = torch.zeros(1, 1, 9, 9).masked_fill(~allowed, torch.finfo(torch.float32).min)
    exact = logits(original, ids(1, 9), attention_mask=mask)
    assert not torch.allclose(exact[:, 5:], logits(original, ids(1, 9))[:, 5:], atol=1e-2)
    assert_close(logits(engine, ids(1, 9), attention_mask=mask), exact)


# ---- nothing accelerated, no word about it: a loud warning, and what was left and why in the report ----


def test_nothing_accelerated_is_a_loud_warning_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "kernels", lambda: "not built here")  # else a linear alone would gain something
    with pytest.warns(UserWarning, match="NOTHING IS ACCELERATED in Sequential: .*linear"):
        engine = infuse.init_inference(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), dtype="fp32")
    assert engine.plan.steps == () and engine.plan.left
    assert engine.plan.left[0].why in engine.report()
    with pytest.warns(UserWarning, match="NOTHING IS ACCELERATED.*replace_with_kernel_inject is False"):
        infuse.init_inference(BY_NAME["llama"].make(), dtype="fp32", replace_with_kernel_inject=False)


# ---- padding on the right, batch > 1: row i of a padded batch equals the unpadded single run ----


@pytest.mark.parametrize("name", ["llama", "gpt2", "gptj", "bloom", "falcon-7b", "gpt-neox", "opt"])
def test_each_row_of_a_batch_that_is_padded_on_the_right_equals_its_single_run(name: str) -> None:
    """Prefill, then two decode steps on the cache, against the original on each row alone."""
    original, engine = pair(name)
    lengths, new, wide = (4, 9, 7), 2, 9
    rows = [ids(1, length + new, seed=length) for length in lengths]
    prompt, mask = torch.zeros(3, wide, dtype=torch.long), torch.zeros(3, wide, dtype=torch.long)
    for i, length in enumerate(lengths):
        prompt[i, :length], mask[i, :length] = rows[i][0, :length], 1
    takes_positions = name not in ("bloom", "opt")
    with torch.no_grad():
        positions = dict(position_ids=(mask.cumsum(-1) - 1).clamp(min=0)) if takes_positions else {}
        found = engine(prompt, attention_mask=mask, use_cache=True, **positions)
        for i, length in enumerate(lengths):
            assert_close(found.logits[i : i + 1][:, mask[i].bool()], logits(original, rows[i][:, :length]))
        for step in range(new):
            mask = torch.cat((mask, torch.ones(3, 1, dtype=torch.long)), dim=1)
            token = torch.stack([row[0, length + step, None] for row, length in zip(rows, lengths, strict=True)])
            positions = dict(position_ids=mask.sum(-1, keepdim=True) - 1) if takes_positions else {}
            past = found.past_key_values
            found = engine(token, attention_mask=mask, past_key_values=past, use_cache=True, **positions)
            for i, length in enumerate(lengths):
                assert_close(found.logits[i : i + 1], logits(original, rows[i][:, : length + step + 1])[:, -1:])


# ---- a 1024-token workspace: wrong results, illegal access ----


def test_more_than_1024_tokens() -> None:
    """The cache grows past any first size, in the prompt and in the answer."""
    original, engine = (BY_NAME["llama"].make(max_position_embeddings=2048, num_hidden_layers=1) for _ in range(2))
    engine = injected(engine)
    given = ids(1, 1500)
    exact = logits(original, given)
    with torch.no_grad():
        first = engine(given[:, :1000], use_cache=True, past_key_values=KVCache())
        second = engine(given[:, 1000:1499], use_cache=True, past_key_values=first.past_key_values)
        third = engine(given[:, 1499:], use_cache=True, past_key_values=second.past_key_values)
    assert_close(torch.cat((first.logits, second.logits, third.logits), dim=1), exact)
    assert torch.equal(
        engine.generate(ids(2, 1030), max_new_tokens=5), original.generate(ids(2, 1030), max_new_tokens=5)
    )
    long = engine.generate(ids(1, 4), max_new_tokens=700)  # beyond what generate prepares at first
    best = logits(original, long[:, :-1]).topk(2)
    chosen = best.indices[0, 3:, 0] == long[0, 4:]
    tied = (best.values[0, 3:, 0] - best.values[0, 3:, 1]) < 1e-3
    assert long.shape == (1, 704) and bool((chosen | tied).all())


Call = Callable[[infuse.InferenceEngine], Any]
TOO_LONG: dict[str, Call] = {
    "generate, ids by position": lambda engine: engine.generate(ids(1, 20), max_new_tokens=2),
    "generate, ids by name": lambda engine: engine.generate(input_ids=ids(1, 10), max_new_tokens=7),
    "generate, inputs": lambda engine: engine.generate(inputs=ids(1, 20), max_new_tokens=1),
    "generate, embeddings": lambda engine: engine.generate(inputs_embeds=torch.randn(1, 20, 48), max_new_tokens=2),
    "generate, max_length": lambda engine: engine.generate(ids(1, 3), max_length=17),
    "generate, config by position": lambda engine: engine.generate(ids(1, 3), t.GenerationConfig(max_new_tokens=14)),
    "module.generate": lambda engine: engine.module.generate(ids(1, 10), max_new_tokens=7),
    "forward, ids by position": lambda engine: engine(ids(1, 17)),
    "forward, ids by name": lambda engine: engine(input_ids=ids(1, 17)),
    "forward, embeddings": lambda engine: engine(inputs_embeds=torch.randn(1, 17, 48)),
    "module, ids by position": lambda engine: engine.module(ids(1, 17)),
    "module, embeddings": lambda engine: engine.module(inputs_embeds=torch.randn(1, 17, 48)),
    "generate, length not said": lambda engine: engine.generate(ids(1, 3)),
    "generate, new ids on a cache": lambda engine: engine.generate(
        ids(1, 3), past_key_values=filled(9), attention_mask=torch.ones(1, 12), max_new_tokens=5
    ),
    "forward, cache by position": lambda engine: engine(ids(1, 3), None, None, filled(14)),
    "forward, on a cache": lambda engine: engine(ids(1, 3), past_key_values=filled(14)),
}


def filled(tokens: int) -> DynamicCache:
    past = DynamicCache()
    for layer in range(3):
        past.update(torch.zeros(1, 2, tokens, 12), torch.zeros(1, 2, tokens, 12), layer)
    return past


@pytest.mark.parametrize("call", TOO_LONG.values(), ids=TOO_LONG)
def test_a_cap_raises_before_any_kernel_runs(call: Call) -> None:
    """max_out_tokens=16 caps prompt and answer together, however the engine or its module is called."""
    engine, ran = injected(BY_NAME["llama"].make(), max_out_tokens=16), []
    for module in engine.module.modules():
        if not list(module.children()):
            module.register_forward_pre_hook(lambda module, args: ran.append(type(module)))
    with pytest.raises(infuse.ContextLimitError, match="max_out_tokens=16"):
        call(engine)
    assert not ran
    assert engine.generate(ids(1, 10), max_new_tokens=6).shape == (1, 16)  # as many as the cap allows
    assert engine(ids(1, 16)).logits.shape == (1, 16, 96) and ran


# ---- another batch size or length crashes ----


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "falcon-7b"])
def test_any_sequence_of_batches_and_lengths_on_one_engine(name: str) -> None:
    original, engine = pair(name)
    dice = random.Random(4)
    for turn in range(12):
        batch, tokens = dice.randint(1, 4), dice.choice((1, 2, 5, 17, 40))
        given = inputs(
            BY_NAME[name], batch, tokens, dice.choice((None, "left", "right")) if tokens > 4 else None, seed=turn
        )
        if dice.random() < 0.3:
            given.pop("attention_mask")
        real = given.get("attention_mask", torch.ones(batch, tokens)).bool()
        assert_close(logits(engine, **given)[real], logits(original, **given)[real])
        if dice.random() < 0.4:
            new = dice.randint(1, 4)
            assert torch.equal(
                engine.generate(**given, max_new_tokens=new), original.generate(**given, max_new_tokens=new)
            )


# ---- 1-token prompts, past_key_values passed by the user, use_cache=False ----

CACHES: dict[str, Callable[[nn.Module], Any]] = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "dynamic, empty": lambda model: DynamicCache(),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=24),
    "KVCache": lambda model: KVCache(),
    "KVCache, preallocated": lambda model: KVCache(capacity_tokens=100, limit_tokens=100),
}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", ["llama", "gemma3", "bloom"])
def test_a_cache_of_the_caller(name: str, kind: str) -> None:
    """A prompt of one token, then several tokens at once, then one, on a cache that the caller made; then generate goes
    on with it.
    """
    original, engine = pair(name)
    given, past = ids(2, 9), CACHES[kind](original)
    for start, stop in ((0, 1), (1, 6), (6, 7)):
        with torch.no_grad():
            found = engine(given[:, start:stop], past_key_values=past, use_cache=True)
        assert found.past_key_values is past and past.get_seq_length() == stop
        assert_close(found.logits, logits(original, given[:, :stop])[:, start:])
    answer = engine.generate(given, past_key_values=past, max_new_tokens=4)
    assert torch.equal(answer, original.generate(given, max_new_tokens=4))
    assert past.get_seq_length() == 12


# ---- outputs overwritten: outputs are the caller's ----


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom"])
def test_outputs_are_the_callers(name: str) -> None:
    """A second call changes nothing that the first one returned, its cache included."""
    _, engine = pair(name)
    with torch.no_grad():
        first = engine(ids(2, 6), use_cache=True, output_hidden_states=True)
        returned = (first.logits, *first.hidden_states, first.past_key_values.layers[0].keys)
        kept = [value.clone() for value in returned]
        engine(ids(2, 6, seed=9), use_cache=True)
        engine.generate(ids(2, 6, seed=8), max_new_tokens=3)
    assert all(map(torch.equal, returned, kept))
    answer = engine.generate(ids(2, 6), max_new_tokens=4)
    kept_answer = answer.clone()
    engine.generate(ids(2, 6, seed=8), max_new_tokens=4)
    assert torch.equal(answer, kept_answer)


# ---- dtype=torch.int8 raises or saves nothing ----


def resident_bytes(model: nn.Module) -> int:
    """Bytes of the storages behind parameters and buffers, shared ones once: what memory the model really holds."""
    storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


WIDE: dict[str, dict[str, Any]] = {
    "llama": dict(hidden_size=128, intermediate_size=256),
    "gpt2": dict(n_embd=128),
    "bloom": dict(hidden_size=128),
}


@pytest.mark.parametrize("name", WIDE)
def test_int8_works_and_saves_memory(name: str) -> None:
    """int8 weights with floating-point activations need fewer resident bytes than the original or than that dtype."""
    original, model = BY_NAME[name].make(**WIDE[name]), BY_NAME[name].make(**WIDE[name])
    before = resident_bytes(model)
    engine = infuse.init_inference(model, dtype=torch.int8)
    quantized = [module for module in engine.module.modules() if isinstance(module, QuantizedLinear)]
    assert len(quantized) >= 12 and all(module.data.dtype == torch.int8 for module in quantized)
    assert engine.plan.dtype.is_floating_point
    unquantized = injected(BY_NAME[name].make(**WIDE[name]), dtype=engine.plan.dtype)
    assert resident_bytes(engine.module) < 0.7 * resident_bytes(unquantized.module) <= 0.7 * before
    exact, found = logits(original, ids(2, 9)), logits(engine, ids(2, 9)).float()
    error = (found - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0 < error < 0.1
    assert engine.generate(ids(2, 9), max_new_tokens=4).shape == (2, 13)


# ---- one CUDA graph for one shape; outputs overwritten ----


def test_cuda_graph_where_there_is_no_cuda_costs_nothing_but_a_word() -> None:
    model = BY_NAME["llama"].make()
    with pytest.warns(UserWarning, match="enable_cuda_graph: no effect here: a CPU has no CUDA graphs"):
        engine = infuse.init_inference(model, dtype="fp32", enable_cuda_graph=True, device="cpu")
    original = BY_NAME["llama"].make()
    kept = [(given, logits(engine, given)) for given in (ids(1, 5), ids(3, 5), ids(1, 8), ids(1, 5, seed=2))]
    for given, found in kept:
        assert_close(found, logits(original, given))


# ---- KV heads, fused QKV, uneven heads ----


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", dict(num_attention_heads=3, num_key_value_heads=1)),
        ("llama", dict(num_attention_heads=6, num_key_value_heads=3, head_dim=10)),
        ("phi3", dict(num_attention_heads=6, num_key_value_heads=2)),
        ("gpt2", dict(n_head=3, n_inner=50)),
        ("bigcode", dict(n_head=6)),
        ("gpt-neox", dict(num_attention_heads=3)),
        ("bloom", dict(n_head=3)),
        ("falcon-40b", dict(num_attention_heads=6, num_kv_heads=3)),
    ],
)
def test_uneven_heads_and_every_packing_of_qkv(name: str, changes: dict[str, Any]) -> None:
    original, engine = BY_NAME[name].make(**changes), injected(BY_NAME[name].make(**changes))
    given = inputs(BY_NAME[name], padding="left")
    real = given["attention_mask"].bool()
    assert_close(logits(engine, **given)[real], logits(original, **given)[real])
    assert torch.equal(engine.generate(**given, max_new_tokens=4), original.generate(**given, max_new_tokens=4))


# ---- meta tensors left ----


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.int8),
        ("gptj", torch.float32),
        ("bloom", torch.bfloat16),
        ("albert", torch.int8),
        ("modernbert", torch.bfloat16),
        ("clip", torch.int8),
    ],
)
def test_nothing_is_left_on_meta(name: str, dtype: torch.dtype) -> None:
    engine = infuse.init_inference(BY_NAME[name].make(), dtype=dtype)
    assert not any(tensor.is_meta for tensor in (*engine.parameters(), *engine.buffers()))
    logits_or_states = engine(**inputs(BY_NAME[name]))[0]
    assert bool(torch.isfinite(logits_or_states).all())


# ---- concurrent calls corrupt each other ----


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """The results of `calls`, each made several times in a thread of its own, all of them at once."""
    results: list[list[Any]] = [[] for _ in calls]
    together = threading.Barrier(len(calls))

    def work(call: Callable[[], Any], out: list[Any]) -> None:
        together.wait()
        for _ in range(4):
            out.append(call())

    threads = [threading.Thread(target=work, args=pair) for pair in zip(calls, results, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(out) == 4 for out in results), "a thread died"
    return results


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "llama-dynamic", "llama-longrope"])
def test_concurrent_calls_equal_those_one_after_another(name: str) -> None:
    original, engine = BY_NAME[name].make(), injected(BY_NAME[name].make())
    prompts = [ids(1, 7), ids(3, 4, seed=2), ids(2, 12, seed=3)]
    calls: list[Callable[[], Any]] = [lambda given=given: engine.generate(given, max_new_tokens=6) for given in prompts]
    calls.append(lambda: logits(engine, prompts[1]))
    calls.append(lambda: engine(prompts[0], output_hidden_states=True).hidden_states[1].detach())
    found = in_threads(calls)
    for given, answers in zip(prompts, found, strict=False):
        exact = original.generate(given, max_new_tokens=6)
        assert all(torch.equal(answer, exact) for answer in answers)
    for answer in found[3]:
        assert_close(answer, logits(original, prompts[1]))
    for state in found[4]:
        assert_close(state, original(prompts[0], output_hidden_states=True).hidden_states[1].detach())


@pytest.mark.parametrize("name", ["llama-dynamic", "llama-longrope"])
def test_only_calls_beyond_the_trained_length_change_what_others_meet(name: str) -> None:
    """The exception that docs/with-other-libraries.md names: frequencies on the model, in the original too."""
    original, engine = BY_NAME[name].make(), injected(BY_NAME[name].make())
    trained = original.config.rope_parameters.get("original_max_position_embeddings")
    trained = trained or original.config.max_position_embeddings
    for model in (original, engine.module):
        frequencies = model.model.rotary_emb.inv_freq.clone()
        model(ids(1, trained))
        assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)
        model(ids(1, trained + 1))
        assert not torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    assert torch.equal(engine.module.model.rotary_emb.inv_freq, original.model.rotary_emb.inv_freq)
    assert_close(logits(engine, ids(2, 7)), logits(original, ids(2, 7)))


# ---- config that lies ----

LIES: dict[str, tuple[str, dict[str, Any]]] = {
    "more heads": ("llama", dict(num_attention_heads=8)),
    "fewer key heads": ("llama", dict(num_key_value_heads=1)),
    "another width": ("llama", dict(hidden_size=64, intermediate_size=100)),
    "another eps": ("llama", dict(rms_norm_eps=0.5)),
    "another activation": ("llama", dict(hidden_act="relu")),
    "other heads of GPT-2": ("gpt2", dict(n_head=2)),
    "another activation of GPT-2": ("gpt2", dict(activation_function="relu")),
    "one key head of Falcon": ("falcon-40b", dict(num_kv_heads=1)),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_config_that_lies_does_no_harm(lie: str) -> None:
    """What the config says changed after the model was built: the results are the module's, whatever was decided."""
    name, claims = LIES[lie]
    original, model = BY_NAME[name].make(), BY_NAME[name].make()
    for each in (original, model):
        each.config = copy.deepcopy(each.config)
        for key, value in claims.items():
            setattr(each.config, key, value)
        for module in each.modules():
            if hasattr(module, "config"):
                module.config = each.config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that little or nothing is accelerated then
        engine = infuse.init_inference(model, dtype="fp32")
    given, past = ids(2, 9), [DynamicCache(), DynamicCache()]
    for start, stop in ((0, 8), (8, 9)):
        exact, found = (
            logits(m, given[:, start:stop], past_key_values=p) for m, p in zip((original, engine), past, strict=True)
        )
        assert_close(found, exact)


# ---- no compiler, wrong compiler ----


def test_without_a_compiler(tmp_path: Path) -> None:
    """An empty PATH, and a compiler that cannot be run: a model is injected all the same."""
    code = """
import torch, transformers, infuse
small = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=16)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)).eval()
exact = model(torch.arange(6)[None]).logits.detach()
engine = infuse.init_inference(model, dtype='fp32')
assert [step.depth for step in engine.plan.steps][:1] == ['block']
assert torch.allclose(engine(torch.arange(6)[None]).logits, exact, atol=1e-5)
"""
    environment = {**os.environ, "PATH": "", "CC": "/nowhere/cc", "CXX": "/nowhere/c++"}
    program = Program("-c", code, folder=tmp_path, environment=environment)
    _, errors = program.communicate(timeout=300)
    assert program.returncode == 0, errors
