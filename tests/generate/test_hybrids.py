"""`generate` of models with recurrent states: verified candidates, sampling, prompts in parts, batches that continue.

transformers refuses to verify candidates for most of them; here the answers are those of plain decoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as t
from torch import Tensor
from transformers import DynamicCache

import infuse
from infuse.cache.kv_cache import KVCache
from infuse.cache.recurrence_slot import StateSlot
from infuse.generate import loop
from infuse.generate.install import uninstall
from infuse.layers.native.one_call import StepCall
from infuse.native import kernels
from tests.models.families import BY_NAME, inputs
from tests.support.ranks import Ranks
from tests.support.side_by_side import injected
from tests.support.states import NAMES, ONE_OF_EACH, family_of

NEW = 24
LOOKUP: dict[str, Any] = {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 2}


def made(name: str, noise: float = 0.0) -> Any:
    """A model that does not repeat one token for ever; with noise it often chooses as the one without."""
    model: Any = family_of(name).make(tie_word_embeddings=False)
    head = model.get_output_embeddings().weight
    head.data += noise * torch.randn(head.shape, generator=torch.Generator().manual_seed(4))
    model.generation_config.num_assistant_tokens = 4
    return model


@cache
def pair(name: str) -> tuple[Any, Any]:
    if name == "zamba2":  # not all of its layers are blocks
        return made(name), infuse.init_inference(made(name), dtype="fp32", progress=False).module
    return made(name), injected(made(name)).module


@cache
def assistant(name: str, kind: str) -> Any:
    model = made(name, noise=0.3)
    return injected(model).module if kind == "injected" else model


def prompt(name: str, batch: int = 1, padding: str | None = None) -> dict[str, Tensor]:
    """Some of whose tokens come again, for the look-up."""
    given = inputs(family_of(name), batch=batch, tokens=9, padding=padding, seed=12)
    given["input_ids"][:, 6:] = given["input_ids"][:, 3:6]
    return given


def generated(model: Any, name: str, *, padding: str | None = None, batch: int = 1, **asked: Any) -> Any:
    torch.manual_seed(5)
    given = prompt(name, batch, padding)
    return model.generate(**given, **{"max_new_tokens": NEW, "do_sample": False, **asked})


@cache
def exact(name: str, padding: str | None = None) -> Tensor:
    return generated(pair(name)[0], name, padding=padding)


@pytest.fixture
def verified() -> Iterator[list[int]]:
    """How many tokens were taken back after each step with candidates."""
    back: list[int] = []
    own = KVCache.rewind

    def rewind(self: KVCache, tokens: int) -> int:
        before = self.get_seq_length()
        kept = own(self, tokens)
        assert kept == min(tokens, before), "states are kept after each verified token"
        back.append(before - kept)
        return kept

    with mock.patch.object(KVCache, "rewind", rewind):
        yield back


@pytest.mark.skipif(isinstance(kernels(), str), reason=str(kernels()))
def test_threads_share_a_wide_convolution() -> None:
    """8,192 channels in tiles of 1,024: each thread moves the state of its own, in place."""
    wide = dict(linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128)
    family = BY_NAME["qwen3_5"]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        given = inputs(family, batch=2, tokens=9, padding="left")
        asked = dict(max_new_tokens=NEW, do_sample=False, output_logits=True, return_dict_in_generate=True)
        wanted = family.make(**wide).generate(**given, **asked)
        answer = injected(family.make(**wide)).module.generate(**given, **asked)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(answer.sequences, wanted.sequences)
    torch.testing.assert_close(torch.stack(answer.logits), torch.stack(wanted.logits), atol=2e-4, rtol=1e-3)


# ---- candidates


@pytest.mark.parametrize("padding", [None, "left"], ids=["", "padded"])
@pytest.mark.parametrize("name", NAMES)
def test_candidates_from_the_prompt(name: str, padding: str | None, verified: list[int]) -> None:
    assert torch.equal(generated(pair(name)[1], name, padding=padding, **LOOKUP), exact(name, padding))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name in NAMES
        for kind in ("injected", "plain", "llama")
        if name in ONE_OF_EACH or kind == "injected"
    ],
)
def test_candidates_from_an_assistant(name: str, kind: str, verified: list[int]) -> None:
    draft = BY_NAME["llama"].make() if kind == "llama" else assistant(name, kind)
    assert torch.equal(generated(pair(name)[1], name, assistant_model=draft), exact(name))
    assert any(verified), "no candidate was rejected"


IN_ONE_CALL = (
    "lfm2", "lfm2_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "granitemoehybrid", "nemotron_h", "mamba2", "jamba",
    "falcon_h1-gated-norm",
)  # fmt: skip


@pytest.mark.skipif(isinstance(kernels(), str), reason=str(kernels()))
@pytest.mark.parametrize("name", IN_ONE_CALL)
def test_candidates_in_bfloat16(name: str, verified: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps that verify candidates go in the same call of C++ as plain ones, so they round alike."""
    engine, draft = (infuse.init_inference(made(name, noise=n), dtype="bf16", progress=False) for n in (0.0, 0.1))
    wanted = generated(engine, name)
    of_tokens: dict[bool, list[bool]] = {False: [], True: []}
    own = StepCall.__call__

    def noted(self: StepCall, block: Any, mixer: Any, x: Tensor, inputs: Any) -> Tensor | None:
        out = own(self, block, mixer, x, inputs)
        if inputs.cache.get_seq_length() > 9 + 1:  # after the prompt
            of_tokens[x.shape[1] > 1].append(out is not None)
        return out

    monkeypatch.setattr(StepCall, "__call__", noted)
    assert torch.equal(generated(engine, name, **LOOKUP), wanted)
    of_tokens[True].clear()
    assert torch.equal(generated(engine, name, assistant_model=draft), wanted)
    assert any(verified) and of_tokens[True] and all(of_tokens[True])
    layers = sum(step.depth == "block" for step in engine.plan.steps)
    assert len(of_tokens[True]) < layers * (NEW - 2), "no candidate was accepted"


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_accepted_candidates_save_steps(name: str) -> None:
    model, calls = pair(name)[1], []
    hook = model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
    try:
        found = generated(model, name, assistant_model=assistant(name, "injected"), return_dict_in_generate=True)
    finally:
        hook.remove()
    assert torch.equal(found.sequences, exact(name)) and len(calls) < NEW
    held = found.past_key_values
    assert held.get_seq_length() == found.sequences.shape[1] - 1
    states = [slot for slot in held.layers if isinstance(slot, StateSlot)]
    assert states and not any(slot.keeps_each for slot in states)
    # The cache goes on as that of plain decoding.
    more = generated(pair(name)[0], name, max_new_tokens=NEW + 3)
    rest = {"input_ids": found.sequences, "attention_mask": torch.ones_like(found.sequences)}
    with torch.no_grad():
        again = model.generate(**rest, past_key_values=held, max_new_tokens=3, do_sample=False)
    assert torch.equal(again, more)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_candidates_from_the_models_first_layers(name: str) -> None:
    assert torch.equal(generated(pair(name)[1], name, assistant_early_exit=2), exact(name))


def on_rank(name: str, kind: str) -> Tensor:
    engine = infuse.init_inference(made(name), dtype="fp32", progress=False, tensor_parallel={"tp_size": 2})
    how = LOOKUP if kind == "lookup" else {"assistant_model": injected(made(name, noise=0.3)).module}
    return generated(engine.module, name, **how)


@pytest.mark.parametrize(("name", "kind"), [("qwen3_5", "lookup"), ("granitemoehybrid-dense", "assistant")])
def test_candidates_over_ranks(name: str, kind: str, ranks: Ranks) -> None:
    assert all(torch.equal(found, exact(name)) for found in ranks.run(2, on_rank, name, kind))


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_sampled_candidates(name: str) -> None:
    """Candidates of the look-up are compared with draws from the model's own distribution: a seed tells the tokens."""
    original, model = pair(name)
    sampled = dict(do_sample=True, temperature=0.8, top_k=20)
    if not original._is_stateful:
        assert torch.equal(generated(model, name, **sampled, **LOOKUP), generated(original, name, **sampled, **LOOKUP))
    found = generated(model, name, **sampled, assistant_model=assistant(name, "injected"))
    assert found.shape[1] == 9 + NEW
    # Where only one token is likely, sampling is the greedy search.
    cold = dict(do_sample=True, temperature=1e-4)
    for how in (LOOKUP, {"assistant_model": assistant(name, "injected")}):
        assert torch.equal(generated(model, name, **cold, **how), exact(name))


@pytest.mark.parametrize("name", ["lfm2", "lfm2_moe"])
def test_candidates_on_transformers_own_cache(name: str) -> None:
    """Which records what convolutions see, until it is cropped."""
    original, model = pair(name)
    for how in (LOOKUP, {"assistant_model": assistant(name, "plain")}):
        own = DynamicCache(config=model.config)
        found = generated(model, name, past_key_values=own, return_dict_in_generate=True, **how)
        assert torch.equal(found.sequences, exact(name)) and found.past_key_values is own
        theirs = DynamicCache(config=model.config)
        generated(original, name, past_key_values=theirs, **how)
        for layer, other in zip(own.layers, theirs.layers, strict=True):
            if hasattr(layer, "conv_states"):
                torch.testing.assert_close(layer.conv_states[0], other.conv_states[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(generated(model, name, cache_implementation="dynamic", **LOOKUP), exact(name))
    recorded = dict(output_hidden_states=True, return_dict_in_generate=True)  # by transformers' own loop
    assert torch.equal(generated(model, name, **recorded, **LOOKUP).sequences, exact(name))


def test_caches_whose_states_do_not_go_back_are_refused() -> None:
    model = pair("qwen3_5")[1]
    for how in (
        dict(past_key_values=DynamicCache(config=model.config)), dict(cache_implementation="dynamic"),
        dict(output_hidden_states=True, return_dict_in_generate=True),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="a cache that can be cropped"):
            generated(model, "qwen3_5", **how, **LOOKUP)
    assert torch.equal(generated(model, "qwen3_5", **LOOKUP), exact("qwen3_5"))


def test_candidates_over_a_cache_that_is_passed_are_refused() -> None:
    model = pair("qwen3_5")[1]
    answered = generated(model, "qwen3_5", return_dict_in_generate=True)
    text = {"input_ids": answered.sequences, "attention_mask": torch.ones_like(answered.sequences)}
    for held in (answered.past_key_values, KVCache()):
        with pytest.raises(infuse.UnsupportedCall, match="this cache holds states"):
            model.generate(**text, past_key_values=held, max_new_tokens=4, **LOOKUP)


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_an_assistant_that_counts_no_tokens_is_refused_before_the_prompt(name: str) -> None:
    draft, streamer = BY_NAME[name].make(), mock.Mock()
    with pytest.raises(infuse.UnsupportedCall, match="inject the assistant, too"):
        generated(pair("qwen3_5")[1], "qwen3_5", assistant_model=draft, streamer=streamer)
    assert not streamer.mock_calls
    assert torch.equal(generated(pair("qwen3_5")[1], "qwen3_5", assistant_model=injected(draft)), exact("qwen3_5"))


# ---- other modes


@pytest.mark.parametrize("kinds", [("moe", "full_attention", "moe"), ("mlp", "linear_attention", "full_attention")])
def test_a_first_layer_that_caches_nothing(kinds: tuple[str, ...]) -> None:
    """Models ask the first layer of a cache how many tokens there are: ours would not know."""
    family = BY_NAME["nemotron_h"]
    family = replace(family, values={**family.values, "layers_block_type": [*kinds]})
    original, engine = family.make(), injected(family.make())
    assert not [left for left in engine.plan.left if left.path.startswith("model.layers.")]
    given = inputs(family, batch=2, tokens=9, padding="left", seed=12)
    for asked in ({}, dict(num_beams=3)):
        settings: dict[str, Any] = dict(max_new_tokens=7, do_sample=False, **asked)
        assert torch.equal(engine.generate(**given, **settings), original.generate(**given, **settings))


@pytest.mark.parametrize("name", ["mamba", "mamba2", "falcon_mamba"])
def test_a_cap_on_tokens_over_caches_that_count_none(name: str) -> None:
    family = BY_NAME[name]
    original, engine = family.make(), injected(family.make(), max_out_tokens=64)
    given = inputs(family, tokens=9)
    for kind in ("dynamic", "static"):
        settings: dict[str, Any] = dict(max_new_tokens=5, do_sample=False, cache_implementation=kind)
        assert torch.equal(engine.generate(**given, **settings), original.generate(**given, **settings))
    with pytest.raises(infuse.ContextLimitError):
        engine.generate(**given, max_new_tokens=60)


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("name", ["mamba", "mamba2", "falcon_mamba", "jamba", "qwen3_5"])
def test_a_chat_goes_on_from_the_cache_of_its_last_answer(name: str, padding: str | None) -> None:
    """The answer to the whole text: of Mamba, whose layers begin several tokens without a state, it is run again."""
    family = BY_NAME[name]
    original, engine = family.make(), injected(family.make())
    settings: dict[str, Any] = dict(max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    given = inputs(family, batch=2, tokens=9, padding=padding, seed=4)
    if name == "jamba":  # its attention counts tokens, so the new ones alone are run, without a state
        theirs = original.generate(**given, **settings)
    found = engine.generate(**given, **settings)
    more = torch.randint(3, 90, (2, 4), generator=torch.Generator().manual_seed(5))
    text = torch.cat((found.sequences, more), dim=1)
    mask = torch.cat((given["attention_mask"], torch.ones(2, 9, dtype=torch.long)), dim=1)
    again = dict(input_ids=text, attention_mask=mask)
    cache = found.past_key_values
    assert isinstance(cache, KVCache)
    after = engine.generate(**again, past_key_values=cache, **settings).sequences
    whole = original.generate(**again, **settings).sequences
    if name == "jamba":
        whole = original.generate(**again, past_key_values=theirs.past_key_values, **settings).sequences
    assert torch.equal(after, whole)


def test_a_cache_with_states_beside_keys_cannot_be_cropped() -> None:
    name = "falcon_h1-gated-norm"
    model, own = pair(name)[1], KVCache()
    with torch.no_grad():
        model(**prompt(name, 1, None), past_key_values=own)
    answered = generated(model, name, return_dict_in_generate=True).past_key_values
    assert all(type(each) is KVCache and not each.is_croppable for each in (own, answered))


IN_PARTS = ["bamba", "falcon_h1-gated-norm", "granitemoehybrid", "lfm2", "nemotron_h", "qwen3_5"]
AS_A_WHOLE = ["mamba2", "jamba", "zamba2"]  # see docs/hybrids.md


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("name", [*IN_PARTS, *AS_A_WHOLE])
def test_a_long_prompt_runs_in_parts(name: str, padding: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has all of the padding: models mask what layers with states see there alone."""
    original, model = pair(name)
    asked: dict[str, Any] = dict(batch=2, padding=padding, max_new_tokens=5)
    wanted = generated(original, name, **asked)
    padded = 9 - int(prompt(name, 2, padding)["attention_mask"].sum(1).min())
    assert bool(padded) == (padding == "left")
    monkeypatch.setattr(loop, "PART_TOKENS", 4)
    calls: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, __, given: calls.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        assert torch.equal(generated(model, name, **asked), wanted)
    finally:
        hook.remove()
    first = 9 if name in AS_A_WHOLE else next(end for end in (1, 3, 5, 7, 9) if end >= padded)
    assert calls[:2] == [first, 1 if first == 9 else 2]


MODES: dict[str, dict[str, Any]] = {
    "sampled": dict(do_sample=True, temperature=0.9, top_k=20),
    "beams": dict(num_beams=3),
    "sampled beams": dict(num_beams=2, do_sample=True, top_k=20),
    "returned": dict(do_sample=True, num_return_sequences=2, top_p=0.9),
    "in parts": dict(prefill_chunk_size=4),
    "own cache": dict(cache_implementation="dynamic"),
    "no cache": dict(use_cache=False),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_modes(name: str, mode: str) -> None:
    original, model = pair(name)
    asked: dict[str, Any] = dict(batch=2, padding=None if mode == "in parts" else "left", max_new_tokens=7)
    # The original cannot count the tokens in a cache of states alone.
    wanted = generated(original, name, **asked, **({} if (name, mode) == ("mamba2", "in parts") else MODES[mode]))
    assert torch.equal(generated(model, name, **asked, **MODES[mode]), wanted)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_continuous_batching_is_refused_as_by_the_original(name: str) -> None:
    original, model = pair(name)
    config = t.GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0)
    with pytest.raises(ValueError, match="Invalid layer type"):
        original.generate_batch([[5, 6, 7]], generation_config=config, progress_bar=False)
    with pytest.raises(infuse.UnsupportedCall, match=r"keys and values alone, and \w+ keeps a state: use generate"):
        model.generate_batch([[5, 6, 7]], generation_config=config, progress_bar=False)


def test_whether_a_model_is_stateful_is_its_own_again() -> None:
    module: Any = infuse.init_inference(made("qwen3_5"), dtype="fp32", progress=False).module
    assert not module._is_stateful
    uninstall(module)
    assert module._is_stateful


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["falcon_h1", "nemotron_h", "qwen3_5"])
def test_a_forward_that_does_not_name_the_cache(name: str, when: str) -> None:
    """A user's wrapper around the model's forward: transformers then lets nobody else pass a cache."""

    def wrapped(model: Any) -> Any:
        forward, calls = model.forward, model.__dict__.setdefault("calls", [])

        def hidden(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return forward(*args, **kwargs)

        model.forward = hidden
        return model

    original = wrapped(made(name))
    model = injected(wrapped(made(name))).module if when == "before" else wrapped(injected(made(name)).module)
    ids = prompt(name, 2)["input_ids"]  # transformers refuses a mask, too
    found, exact = (each.generate(ids, max_new_tokens=5, do_sample=False) for each in (model, original))
    assert torch.equal(found, exact)
    assert len(model.calls) == len(original.calls) == 5


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "lfm2"])
def test_models_that_are_cast_to_float64(name: str) -> None:
    """The kernels have no float64: these steps are made without them."""
    original, model = BY_NAME[name].make().double(), injected(BY_NAME[name].make()).module.double()
    given = inputs(BY_NAME[name], batch=2, tokens=9, seed=3)
    found, exact = (each.generate(**given, max_new_tokens=5, do_sample=False) for each in (model, original))
    assert torch.equal(found, exact)


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "nemotron_h", "mamba2"])
def test_caches_say_whether_they_have_a_state(name: str) -> None:
    """As transformers' cache, for the layers that it asks."""
    original, model = made(name), injected(made(name)).module
    settings: dict[str, Any] = dict(max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    theirs, ours = (each.generate(**prompt(name), **settings).past_key_values for each in (original, model))
    assert isinstance(ours, KVCache)
    assert ours.has_previous_state() is theirs.has_previous_state() is True
    for index, slot in enumerate(ours.layers):
        if isinstance(slot, StateSlot) or (index, "mamba") in ours.more:
            assert ours.has_previous_state(index) is theirs.has_previous_state(index) is True
        else:
            with pytest.raises(ValueError, match="has_previous_state"):
                ours.has_previous_state(index)
    with pytest.raises(ValueError, match="has_previous_state"):
        KVCache().has_previous_state()
