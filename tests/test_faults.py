"""Faults that users of comparable libraries reported, in the words of the reports: masks, lengths, caches, ways to
generate.

What is compared with is always transformers' own model with the same weights. More of them in test_faults_in_use.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as t
from families import BY_NAME, inputs
from side_by_side import TOLERANCE, assert_close, ids, injected, logits, pair
from torch import nn
from transformers.cache_utils import DynamicCache, StaticCache

import infuse
from infuse import native
from infuse.layers.cache import KVCache

# One of each way in which positions reach a layer and q, k, v lie in memory.
FAMILIES = ("llama", "gemma3", "gpt2", "gptj", "bloom", "falcon-7b", "gpt-neox", "opt", "mpt")
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


# ---- left padding, batch > 1: row i of a padded batch equals the unpadded single run ----


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", FAMILIES)
def test_each_row_of_a_padded_batch_equals_its_single_run(name: str, side: str) -> None:
    """Prefill, then two decode steps on the cache, against the original on each row alone."""
    original, engine = pair(name)
    lengths, new, wide = (4, 9, 7), 2, 9
    rows = [ids(1, length + new, seed=length) for length in lengths]
    prompt, mask = torch.zeros(3, wide, dtype=torch.long), torch.zeros(3, wide, dtype=torch.long)
    for i, length in enumerate(lengths):
        place = slice(wide - length, wide) if side == "left" else slice(0, length)
        prompt[i, place], mask[i, place] = rows[i][0, :length], 1
    with torch.no_grad():
        positions = dict(position_ids=(mask.cumsum(-1) - 1).clamp(min=0)) if takes_positions(original) else {}
        found = engine(prompt, attention_mask=mask, use_cache=True, **positions)
        for i, length in enumerate(lengths):
            assert_close(found.logits[i : i + 1][:, mask[i].bool()], logits(original, rows[i][:, :length]))
        if name in ("mpt", "gemma3") and side == "right":
            # MPT's positions and Gemma's windows count places: in transformers itself the gap before the answer counts
            return
        for step in range(new):
            mask = torch.cat((mask, torch.ones(3, 1, dtype=torch.long)), dim=1)
            token = torch.cat(
                [row[:, length + step : length + step + 1] for row, length in zip(rows, lengths, strict=True)]
            )
            positions = dict(position_ids=(mask.sum(-1, keepdim=True) - 1)) if positions else {}
            found = engine(
                token, attention_mask=mask, past_key_values=found.past_key_values, use_cache=True, **positions
            )
            for i, length in enumerate(lengths):
                assert_close(found.logits[i : i + 1], logits(original, rows[i][:, : length + step + 1])[:, -1:])


def takes_positions(model: nn.Module) -> bool:
    return not isinstance(model, (t.BloomForCausalLM, t.MptForCausalLM, t.OPTForCausalLM))


@pytest.mark.parametrize("name", FAMILIES)
def test_each_row_of_a_padded_batch_generates_what_it_generates_alone(name: str) -> None:
    original, engine = pair(name)
    given = inputs(BY_NAME[name], batch=2, tokens=10, padding="left", seed=6)
    found = engine.generate(**given, max_new_tokens=6)
    for i, row in enumerate(given["input_ids"]):
        alone = row[given["attention_mask"][i].bool()][None]
        assert found[i, 10:].tolist() == original.generate(alone, max_new_tokens=6)[0, alone.shape[1] :].tolist()


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


# ---- no beam search ----


@pytest.mark.parametrize("name", FAMILIES)
def test_beam_search(name: str) -> None:
    original, engine = pair(name)
    given = inputs(BY_NAME[name], padding="left")
    asked = dict(num_beams=4, num_return_sequences=3, max_new_tokens=6, repetition_penalty=1.3)
    assert torch.equal(engine.generate(**given, **asked), original.generate(**given, **asked))


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
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "bloom", "falcon-7b"])
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


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "falcon-7b"])
def test_without_a_cache(name: str) -> None:
    original, engine = pair(name)
    with torch.no_grad():
        found = engine(ids(2, 5), use_cache=False)
    assert found.past_key_values is None
    assert_close(found.logits, logits(original, ids(2, 5)))
    assert torch.equal(
        engine.generate(ids(2, 1), use_cache=False, max_new_tokens=5), original.generate(ids(2, 1), max_new_tokens=5)
    )


def test_prefill_is_told_by_the_cache() -> None:
    """One token into an empty cache is a prompt, several into a full one are not; the same object serves again after
    reset.
    """
    original, engine = pair("llama")
    past = KVCache()
    for given in (ids(1, 1), ids(3, 6, seed=2)):
        past.reset()
        with torch.no_grad():
            assert_close(engine(given, past_key_values=past).logits, logits(original, given))


# ---- outputs overwritten: outputs are the caller's ----


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom"])
def test_outputs_are_the_callers(name: str) -> None:
    """A second call changes nothing that the first one returned, its cache included."""
    _, engine = pair(name)
    with torch.no_grad():
        first = engine(ids(2, 6), use_cache=True, output_hidden_states=True)
        kept = [value.clone() for value in (first.logits, *first.hidden_states, first.past_key_values.layers[0].keys)]
        engine(ids(2, 6, seed=9), use_cache=True)
        engine.generate(ids(2, 6, seed=8), max_new_tokens=3)
    for value, copy in zip(
        (first.logits, *first.hidden_states, first.past_key_values.layers[0].keys), kept, strict=True
    ):
        assert torch.equal(value, copy)
    answer = engine.generate(ids(2, 6), max_new_tokens=4)
    copy = answer.clone()
    engine.generate(ids(2, 6, seed=8), max_new_tokens=4)
    assert torch.equal(answer, copy)
