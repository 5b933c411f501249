"""Speculative decoding gives the tokens of plain decoding, draws from the model's distribution, and copies no cache."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor

import infuse
from infuse.cache.kv_cache import KVCache
from infuse.cache.slot import KVSlot
from infuse.generate.candidates import most_candidates
from infuse.generate.speculation import accepted
from infuse.native import isa, limits
from tests.models.families import BY_NAME, inputs
from tests.support.asked_of_generate import OddTokensOnly, StopAtLength
from tests.support.ranks import Ranks
from tests.support.side_by_side import injected

NEW = 26


def made(name: str = "llama", noise: float = 0.0) -> Any:
    """A model that does not repeat one token for ever; with noise it often chooses as the one without."""
    model: Any = BY_NAME[name].make(tie_word_embeddings=False)
    head = model.get_output_embeddings().weight
    head.data += noise * torch.randn(head.shape, generator=torch.Generator().manual_seed(4))
    return model


@cache
def pair(name: str = "llama") -> tuple[Any, Any]:
    return made(name), injected(made(name)).module


@cache
def draft(kind: str) -> Any:
    """An assistant: the model's neighbour, which proposes up to five tokens."""
    model = made(noise=0.3)
    model.generation_config.num_assistant_tokens = 5
    if kind == "plain":
        return model
    engine = infuse.init_inference(model, dtype="fp32", quant="int8" if kind == "quantized" else None)
    return engine if kind == "engine" else engine.module


def prompt(name: str = "llama", padded: bool = False, seed: int = 12) -> dict[str, Tensor]:
    return inputs(BY_NAME[name], batch=1, tokens=9, padding="left" if padded else None, seed=seed)


def generated(model: Any, name: str = "llama", seed: int = 12, padded: bool = False, **asked: Any) -> Any:
    torch.manual_seed(5)
    return model.generate(**prompt(name, padded, seed), **{"max_new_tokens": NEW, "do_sample": False, **asked})


LOOKUP: dict[str, Any] = {"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 2}
WAYS = ["lookup", "early exit", "plain", "injected", "quantized", "engine"]


def way(kind: str) -> dict[str, Any]:
    if kind == "lookup":
        return LOOKUP
    if kind == "early exit":
        return {"assistant_early_exit": 1}
    return {"assistant_model": draft(kind)}


class Put(t.generation.streamers.BaseStreamer):
    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.pieces.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


# ---- tokens ----


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("kind", WAYS)
def test_tokens_are_those_of_plain_decoding(kind: str, padded: bool) -> None:
    """In fewer steps, each of which is told to the streamer, if some candidates are right."""
    (original, model), streamer = pair(), Put()
    exact = generated(original, padded=padded)
    assert torch.equal(generated(model, padded=padded, streamer=streamer, **way(kind)), exact)
    assert [token for piece in streamer.pieces for token in piece] == exact[0].tolist() and streamer.ended == 1
    assert kind == "early exit" or (kind == "lookup" and padded) or len(streamer.pieces) < 1 + NEW


@pytest.mark.parametrize("name", ["gpt2", "bloom", "mistral", "phi3", "qwen3-moe", "gpt-neox"])
def test_families(name: str) -> None:
    """Positions as embeddings, as a bias; a window that is reached; a preparation of the model's own."""
    changes = {"sliding_window": 14} if name == "mistral" else {}
    original, model = BY_NAME[name].make(**changes), injected(BY_NAME[name].make(**changes)).module
    assert torch.equal(generated(model, name, **LOOKUP), generated(original, name))


@pytest.mark.parametrize("name, tokens", [("llama-longrope", 63), ("llama-dynamic", 126)])
def test_rotations_that_depend_on_a_calls_tokens_are_transformers_own(name: str, tokens: int) -> None:
    """From the length of training on, tokens depend on how many candidates are in a call."""
    prompt = torch.randint(3, 96, (1, tokens), generator=torch.Generator().manual_seed(5))
    prompt[:, -6:] = prompt[:, :6]
    asked = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **LOOKUP}
    models = BY_NAME[name].make(), injected(BY_NAME[name].make(), verify="off").module
    exact, found = (model.generate(prompt, **asked) for model in models)
    assert torch.equal(found, exact)


ASKED: dict[str, Any] = {
    "repetition penalty": {"repetition_penalty": 1.5},
    "processor": {"logits_processor": t.LogitsProcessorList([OddTokensOnly()])},
    "criterion": {"stopping_criteria": t.StoppingCriteriaList([StopAtLength(22)])},
    "min_new_tokens": {"min_new_tokens": 20},
    "max_length": {"max_new_tokens": None, "max_length": 21},
}


@pytest.mark.parametrize("kind", ["lookup", "injected"])
@pytest.mark.parametrize("asked", ASKED)
def test_what_the_caller_brings_along(asked: str, kind: str) -> None:
    original, model = pair()
    more = dict(ASKED[asked])
    if asked == "min_new_tokens":
        more["eos_token_id"] = generated(original)[0, 15].item()
    assert torch.equal(generated(model, **more, **way(kind)), generated(original, **more))


class Recorded(t.StoppingCriteria):
    """How many scores it was given at each length."""

    def __init__(self) -> None:
        self.counts: dict[int, int | None] = {}

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.counts[input_ids.shape[1]] = None if scores is None else len(scores)
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_criteria_see_the_scores_that_are_recorded() -> None:
    _, model = pair()
    for records in (False, True):
        criterion, more = Recorded(), {"return_dict_in_generate": records, "output_scores": records}
        generated(model, stopping_criteria=[criterion], **more, **LOOKUP)
        assert criterion.counts == {9 + n: n if records else None for n in range(1, NEW + 1)}


@pytest.mark.parametrize("kind", ["lookup", "injected"])
def test_guidance_keeps_its_own_cache_in_order(kind: str) -> None:
    """Its processor is asked once for each token: candidates, which it would see too, are left out."""
    original, model = pair()
    exact = generated(original, guidance_scale=1.5)
    assert torch.equal(generated(model, guidance_scale=1.5, **way(kind)), exact)


def test_beams_are_not_disturbed_by_an_assistant() -> None:
    """transformers passes it on to every layer there."""
    original, model = pair()
    found, exact = (generated(one, num_beams=2, assistant_model=draft("injected")) for one in (model, original))
    assert torch.equal(found, exact)


@pytest.mark.parametrize("kind", ["lookup", "injected"])
def test_each_token_as_the_end(kind: str) -> None:
    """Of the answer's own: wherever in a step it comes, nothing follows it."""
    original, model = pair()
    for token in set(generated(original)[0, 9:].tolist()):
        exact = generated(original, eos_token_id=token, pad_token_id=0)
        assert torch.equal(generated(model, eos_token_id=token, pad_token_id=0, **way(kind)), exact)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["lookup", "injected"])
def test_the_record_is_transformers_own(kind: str, sampled: bool) -> None:
    """Scores, logits and the cache's length too; drawn tokens from the same random numbers.

    transformers looks up more candidates than may follow before the end, which takes other random numbers there.
    """
    more = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "do_sample": sampled}
    original, model = pair()
    ours, theirs = (generated(one, **more, **way(kind)) for one in (model, original))
    same = 9 + NEW - (5 if sampled and kind == "lookup" else 0)
    assert torch.equal(ours.sequences[:, :same], theirs.sequences[:, :same]) and ours.keys() == theirs.keys()
    for name in ("scores", "logits"):
        mine, wanted = (torch.cat(one[name])[: same - 9] for one in (ours, theirs))
        torch.testing.assert_close(mine, wanted, atol=2e-4, rtol=1e-4)
    assert ours.past_key_values.get_seq_length() == theirs.past_key_values.get_seq_length() == 9 + NEW - 1


def test_several_rows_and_other_vocabularies_are_refused() -> None:
    told, wrong = [], BY_NAME["llama"].make(vocab_size=100)
    for model in pair():
        for ids, more in ((torch.ones(2, 5).long(), LOOKUP), (torch.ones(1, 5).long(), {"assistant_model": wrong})):
            with pytest.raises(ValueError) as caught:
                model.generate(ids, max_new_tokens=4, **more)
            told.append(str(caught.value))
    assert told[:2] == told[2:] and "batch_size = 1" in told[0] and "different tokenizers" in told[1]


def assisted_on_rank() -> list[Tensor]:
    """Of a model that ranks share: greedy tokens by a draft that each has alone, drawn ones by one that they share."""
    engine, found = infuse.init_inference(made(), dtype="fp32", mp_size=2), []
    for sample, shares in ((False, {}), (True, {"mp_size": 2})):
        helper = infuse.init_inference(made(noise=0.3), dtype="fp32", **shares)
        helper.module.generation_config.num_assistant_tokens = 3
        torch.manual_seed(100 + torch.distributed.get_rank())  # rank 0's counts
        found.append(engine.generate(**prompt(), max_new_tokens=8, do_sample=sample, assistant_model=helper))
    return found


def test_ranks_have_the_same_tokens(ranks: Ranks) -> None:
    one, other = ranks.run(2, assisted_on_rank)
    assert all(map(torch.equal, one, other)) and not torch.equal(one[0], one[1])
    assert torch.equal(one[0], generated(pair()[0], max_new_tokens=8))


# ---- cost ----


@pytest.mark.parametrize("kind", ["lookup", "injected"])
def test_nothing_is_copied_or_prepared_again(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage is made once for each layer, also where prompt and answer fill `max_out_tokens`; `generate` runs once."""
    model, exact = injected(made(), max_out_tokens=9 + NEW), generated(pair()[0])
    asked, grown, calls = way(kind), [], []
    grow, prepare = KVSlot._grow, t.GenerationMixin._prepare_generation_config

    def prepared(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return prepare(*args, **kwargs)

    monkeypatch.setattr(KVSlot, "_grow", lambda slot, *given: grown.append(slot) or grow(slot, *given))
    monkeypatch.setattr(t.GenerationMixin, "_prepare_generation_config", prepared)
    found = generated(model, return_dict_in_generate=True, **asked)
    assert len(calls) == 1 and torch.equal(found.sequences, exact)
    layers = len(found.past_key_values.layers)
    assert isinstance(found.past_key_values, KVCache)
    assert len(grown) == len(set(map(id, grown))) == layers * (1 if kind == "lookup" else 2)


@pytest.mark.skipif(isa() is None, reason="no C++ kernels")
def test_steps_are_as_long_as_the_kernels_stream() -> None:
    """However many candidates there may be: longer ones would cost more and round otherwise."""
    _, model = pair()
    lengths: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    helper = infuse.init_inference(made(), dtype="fp32").module
    helper.generation_config.num_assistant_tokens = 40
    helper.generation_config.assistant_confidence_threshold = 0.0
    for more in ({"assistant_model": helper}, {"prompt_lookup_num_tokens": 40}):
        generated(model, max_new_tokens=60, **more)
    handle.remove()
    most = limits().few_tokens
    assert lengths[0] == 9 and max(length for length in lengths if length != 9) <= most and lengths.count(most) >= 2


# ---- rounding ----


@pytest.mark.skipif(isa() is None, reason="no C++ kernels")
@pytest.mark.parametrize(
    "quant", ["", "int8", "int4", "fp8", "fp6", "int8:a8", "int4:a8", "int8 in a window", "int4 of experts"]
)
def test_rows_do_not_depend_on_each_other(quant: str) -> None:
    """In bf16, a step of several tokens gives the logits and the cache of as many steps, bit for bit."""
    if not quant and not str(isa()).startswith("avx512"):
        pytest.skip("plain weights: with AVX-512")
    sizes = {"hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 4, "num_key_value_heads": 2}
    family = BY_NAME["mistral" if "window" in quant else "qwen3-moe" if "experts" in quant else "llama"]
    if "window" in quant:
        sizes |= {"sliding_window": 37}
    original = family.make(**sizes)
    model: Any = infuse.init_inference(original, dtype="bf16", quant=quant.split(" ")[0] or None, verify="off").module
    rows = (most_candidates(model) or 0) + 1
    ids = inputs(family, batch=1, tokens=70 + rows)["input_ids"]
    with torch.inference_mode():
        one = KVCache(128)
        model(ids[:, :70], past_key_values=one)
        single = torch.cat([model(ids[:, n : n + 1], past_key_values=one).logits for n in range(70, ids.shape[1])], 1)
        for count in range(2, rows + 1):
            several = KVCache(128)
            model(ids[:, :70], past_key_values=several)
            logits = model(ids[:, 70 : 70 + count], past_key_values=several).logits
            assert torch.equal(logits, single[:, :count]), count
            for mine, wanted in zip(several.layers, one.layers, strict=True):
                for name in ("keys", "values"):
                    assert torch.equal(getattr(mine, name), getattr(wanted, name)[:, :, : 70 + count]), (count, name)


# ---- distribution ----


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """The statistic over its degrees of freedom: near 1 if the counts are drawn from what is expected."""
    return float(((counts - expected) ** 2 / expected).sum() / (len(expected) - 1))


def test_accepted_candidates_are_distributed_as_the_model_says() -> None:
    """Two candidates drawn from q, then the rule: the first two tokens are distributed as p, whatever q is."""
    torch.manual_seed(3)
    p_NV, q_TV = torch.randn(3, 4).softmax(-1), torch.randn(2, 4).softmax(-1)
    counts = torch.zeros(4, 4)
    draws = 4000
    for candidates in torch.multinomial(q_TV, draws, replacement=True).t():
        tokens = accepted(p_NV, q_TV, candidates)
        second = tokens[1] if len(tokens) > 1 else int(torch.multinomial(p_NV[1], 1))
        counts[tokens[0], second] += 1
    expected = draws * p_NV[0][:, None] * p_NV[1]
    assert chi_square(counts.flatten(), expected.flatten()) < 1.9  # 15 degrees of freedom: one of 60 draws is beyond
    assert chi_square(counts.flatten(), (draws * q_TV[0][:, None] * q_TV[1]).flatten()) > 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lookup", "draft"])
@pytest.mark.parametrize("states", [False, True], ids=["llama", "qwen3_5"])
def test_answers_are_distributed_as_the_model_says(states: bool, kind: str) -> None:
    """Answers of two tokens of a vocabulary of five, against the products of the model's own chances."""
    config: Any = t.LlamaConfig(
        vocab_size=5,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        eos_token_id=None,
        initializer_range=0.3,
    )
    if states:  # which go back where candidates are rejected
        of_states = dict(BY_NAME["qwen3_5"].values, layer_types=["linear_attention"] * 2 + ["full_attention"])
        config = t.Qwen3_5TextConfig(**{**of_states, "vocab_size": 5, "eos_token_id": None, "initializer_range": 0.3})
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        made = (t.Qwen3_5ForCausalLM if states else t.LlamaForCausalLM)(config).eval()
        models.append(infuse.init_inference(made, dtype="fp32").module)
    model, helper = models
    helper.generation_config.update(num_assistant_tokens=2, assistant_confidence_threshold=0.0)
    ids, draws = torch.tensor([[1, 2, 3, 1, 2]]), 500
    with torch.no_grad():
        first = model(ids).logits[0, -1].softmax(-1)
        both = torch.cat((ids.expand(5, -1), torch.arange(5)[:, None]), dim=1)
        expected = draws * first[:, None] * model(both).logits[:, -1].softmax(-1)
    more = {"prompt_lookup_num_tokens": 2} if kind == "lookup" else {"assistant_model": helper}
    counts = torch.zeros(5, 5)
    torch.manual_seed(8)
    for _ in range(draws):
        found = model.generate(ids, max_new_tokens=2, do_sample=True, top_k=0, pad_token_id=0, **more)
        counts[found[0, 5], found[0, 6]] += 1
    assert chi_square(counts.flatten(), expected.flatten()) < 1.8  # 24 degrees of freedom: one of 100 is beyond
