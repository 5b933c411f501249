"""Every way to generate gives the original's tokens in float32, on padded batches; what our own loop follows.

Each argument of `generate` by itself: tests/clients/test_generate_arguments.py."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch
import transformers as t
from peft import PrefixTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers.generation import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinNewTokensLengthLogitsProcessor,
)

import infuse
from infuse.cache.kv_cache import KVCache
from infuse.generate import loop
from infuse.generate.choose import Processed, ends_of
from tests.models.every_architecture import tiny_config
from tests.models.families import BY_NAME, inputs
from tests.support.asked_of_generate import OddTokensOnly, StopAtLength
from tests.support.side_by_side import injected as with_blocks

NAMES = ("llama", "gpt2", "bloom")
PROMPT, NEW = 9, 10
# All of them on a batch whose first row is padded on the left.
MODES: dict[str, dict[str, Any]] = {
    "greedy": dict(do_sample=False),
    "top-k": dict(do_sample=True, top_k=12, temperature=0.8),
    "top-p": dict(do_sample=True, top_p=0.7, top_k=0, temperature=1.3),
    "beams": dict(num_beams=3, length_penalty=0.5),
    "beams, early": dict(num_beams=4, early_stopping=True, eos_token_id=[5, 17, 40, 61]),
    "beam sampling": dict(num_beams=2, do_sample=True, top_k=30),
    "several beams returned": dict(num_beams=3, num_return_sequences=2),
    "several samples returned": dict(do_sample=True, num_return_sequences=3),
    "repetition penalty": dict(repetition_penalty=1.5),
    "no repeated n-gram": dict(no_repeat_ngram_size=2),
    "static cache": dict(cache_implementation="static"),
    "dynamic cache": dict(cache_implementation="dynamic"),
    "no cache": dict(use_cache=False),
    "bad words": dict(bad_words_ids=[[5], [9], [29], [60]]),
    "config by keyword": dict(
        generation_config=t.GenerationConfig(max_new_tokens=NEW, num_beams=2, pad_token_id=0, eos_token_id=None)
    ),
}


def made(name: str) -> nn.Module:
    """A model that does not repeat one token for ever, as these tiny ones do if the head is tied to the embeddings."""
    return BY_NAME[name].make(tie_word_embeddings=False)


@cache
def pair(name: str) -> tuple[nn.Module, infuse.InferenceEngine]:
    """The original, and the same model injected, both in float32."""
    return made(name), injected(name)


def injected(name: str) -> infuse.InferenceEngine:
    return with_blocks(made(name))


def padded(name: str, batch: int = 3, tokens: int = PROMPT) -> dict[str, Tensor]:
    return inputs(BY_NAME[name], batch=batch, tokens=tokens, padding="left", seed=11)


def seeded(model: Any, *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(5)
    return model.generate(*args, **{"max_new_tokens": NEW, **kwargs})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["gpt2", "bloom"])
def test_modes(name: str, mode: str) -> None:
    """By the engine and by its module: the two things that people call `generate` on."""
    original, engine = pair(name)
    exact = seeded(original, **padded(name), **MODES[mode])
    assert exact.shape[1] > PROMPT
    for model in (engine, engine.module):
        assert torch.equal(seeded(model, **padded(name), **MODES[mode]), exact)


@pytest.mark.parametrize("mode", ["greedy", "beams"])
def test_blocks_beside_layers_that_keep_another_state(mode: str) -> None:
    """LFM2's convolutions do: ours holds keys and values, so the cache is the one that transformers makes."""
    config = tiny_config(t.Lfm2Config)
    assert {"conv", "full_attention"} == {*config.layer_types}
    torch.manual_seed(0)
    original = t.Lfm2ForCausalLM(config).eval()
    original.generation_config.eos_token_id = None
    engine = infuse.init_inference(copy.deepcopy(original), dtype=torch.float32, replace_with_kernel_inject=True)
    assert any(step.depth == "block" for step in engine.plan.steps)
    given = dict(input_ids=torch.arange(1, 2 * PROMPT + 1).view(2, PROMPT), max_new_tokens=NEW, **MODES[mode])
    assert torch.equal(engine.generate(**given), original.generate(**given))


@pytest.mark.parametrize("name", NAMES)
def test_modes_are_told_apart(name: str) -> None:
    """Guards the test above: a mode that were ignored would give the greedy tokens, and these are several different
    ones.
    """
    original, _ = pair(name)
    greedy = seeded(original, **padded(name))
    assert len(greedy[:, PROMPT:].unique()) > 3
    for mode in ("top-k", "top-p", "beams", "repetition penalty", "no repeated n-gram", "bad words"):
        assert not torch.equal(seeded(original, **padded(name), **MODES[mode]), greedy), mode


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_end_at_different_times(name: str) -> None:
    original, engine = pair(name)
    rows = seeded(original, **padded(name))[:, PROMPT:].tolist()

    def lengths(ends: tuple[int, ...]) -> set[int]:
        return {next((at for at, token in enumerate(row) if token in ends), NEW) for row in rows}

    ends = max(combinations(sorted({token for row in rows for token in row}), 2), key=lambda pair: len(lengths(pair)))
    assert len(lengths(ends)) > 1, "the rows were to end at different times"
    exact = seeded(original, **padded(name), eos_token_id=list(ends), pad_token_id=0)
    assert torch.equal(seeded(engine, **padded(name), eos_token_id=list(ends), pad_token_id=0), exact)


# ---- speculation: transformers does it for one row ----


def one_row(name: str) -> dict[str, Tensor]:
    return inputs(BY_NAME[name], batch=1, tokens=PROMPT, seed=12)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_assisted(name: str) -> None:
    """The tokens are those of the model alone, whatever the assistant proposes; it is asked, and some proposals are
    taken.
    """
    original, engine = pair(name)
    assistant: Any = made(name)  # the same weights, then disturbed a little: right sometimes
    with torch.no_grad():
        assistant.get_output_embeddings().weight.add_(0.4 * torch.randn(96, 48))
    exact = seeded(original, **one_row(name), max_new_tokens=24)
    with counted(assistant) as asked, counted(engine.module) as own:
        found = seeded(engine, **one_row(name), assistant_model=assistant, max_new_tokens=24)
    assert torch.equal(found, exact)
    assert len(asked) > 1 and len(own) < 24


@contextmanager
def counted(module: nn.Module) -> Iterator[list[int]]:
    """How many tokens each forward of `module` inside the `with` block was given."""
    tokens: list[int] = []

    def count(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        tokens.append((args[0] if args else kwargs["input_ids"]).shape[1])

    handle = module.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield tokens
    finally:
        handle.remove()


# ---- what the caller brings along ----


class Collected:
    """A streamer: what was put, and whether the end was told."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended += 1


def test_logits_processor() -> None:
    original, engine = pair("llama")
    processors = t.LogitsProcessorList([OddTokensOnly()])
    exact = seeded(original, **padded("llama"), logits_processor=processors)
    assert (exact[:, PROMPT:] % 2 == 1).all()
    assert torch.equal(seeded(engine, **padded("llama"), logits_processor=processors), exact)


@pytest.mark.parametrize(
    "own", [dict(cache_implementation="static"), dict(use_cache=False), dict(max_new_tokens=4)], ids=str
)
def test_what_the_models_own_generation_config_says_counts(own: dict[str, Any]) -> None:
    """transformers fills what a given config leaves open from the model's own."""
    models = made("llama"), injected("llama").module
    for model in models:
        model.generation_config.update(**own)
    settings = t.GenerationConfig(repetition_penalty=1.5, pad_token_id=0)
    exact, found = (
        model.generate(**padded("llama"), generation_config=settings, return_dict_in_generate=True) for model in models
    )
    assert torch.equal(found.sequences, exact.sequences)
    assert isinstance(found.past_key_values, KVCache if "max_new_tokens" in own else type(exact.past_key_values))


# ---- prompts ----


@pytest.mark.parametrize("name", NAMES)
def test_prompt_of_embeddings(name: str) -> None:
    original, engine = pair(name)
    given = padded(name)
    embedded = original.get_input_embeddings()(given["input_ids"]).detach() * 1.1  # no row of the table
    asked = dict(inputs_embeds=embedded, attention_mask=given["attention_mask"])
    exact = seeded(original, **asked)
    assert exact.shape[1] == NEW
    assert torch.equal(seeded(engine, **asked), exact)


def test_embeddings_of_another_width_are_refused() -> None:
    model = infuse.init_inference(BY_NAME["llama"].make(), dtype="fp32").module
    for rows, tokens in ((1, 1), (3, 14), (4, 60)):
        with pytest.raises(RuntimeError):
            model.generate(inputs_embeds=torch.randn(rows, tokens, 40), max_new_tokens=2)


@pytest.mark.parametrize("name", NAMES)
def test_second_turn_on_the_returned_cache(name: str) -> None:
    """The returned cache holds all but the last token, and the second turn computes only what is new."""
    original, engine = pair(name)
    given, more = padded(name), inputs(BY_NAME[name], batch=3, tokens=4, seed=13)["input_ids"]
    exact, found = (seeded(model, **given, return_dict_in_generate=True) for model in (original, engine))
    assert isinstance(found.past_key_values, KVCache)
    assert found.past_key_values.get_seq_length() == PROMPT + NEW - 1
    whole = torch.cat((exact.sequences, more), dim=1)
    mask = torch.cat((given["attention_mask"], torch.ones(3, NEW + 4, dtype=torch.long)), dim=1)
    with counted(engine.module) as tokens:
        second = seeded(engine, whole, attention_mask=mask, past_key_values=found.past_key_values)
    assert tokens == [5] + [1] * (NEW - 1)
    assert torch.equal(second, seeded(original, whole, attention_mask=mask))
    assert torch.equal(second, seeded(original, whole, attention_mask=mask, past_key_values=exact.past_key_values))


# ---- long prompts ----


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "bloom"])
def test_a_long_prompt_runs_in_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded on the left by more than a part; the first part is the shorter one."""
    original, engine = made(name), injected(name)
    given = padded(name, batch=2, tokens=23)
    given["attention_mask"][0, :9] = 0
    exact = seeded(original, **given)
    monkeypatch.setattr(loop, "PART_TOKENS", 8)
    with counted(engine.module) as tokens:
        assert torch.equal(seeded(engine, **given), exact)
    assert tokens == [3] + [4] * 5 + [1] * (NEW - 1)
    monkeypatch.setattr(loop, "MASK_VALUES", 4 * 23)  # four tokens of both rows together, over all 23
    monkeypatch.setattr(loop, "LEAST_PART_TOKENS", 1)
    with counted(engine.module) as tokens:
        assert torch.equal(seeded(engine, **given), exact)
    assert tokens == [1] + [2] * 11 + [1] * (NEW - 1)
    monkeypatch.setattr(loop, "LEAST_PART_TOKENS", 6)
    with counted(engine.module) as tokens:
        assert torch.equal(seeded(engine, **given), exact)
    assert tokens == [2] + [3] * 7 + [1] * (NEW - 1)
    exact = seeded(original, **one_row(name), prompt_lookup_num_tokens=2)
    monkeypatch.setattr(loop, "PART_TOKENS", 4)
    assert torch.equal(seeded(engine, **one_row(name), prompt_lookup_num_tokens=2), exact)


def test_a_prompt_on_a_cache_runs_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    original, engine = pair("llama")
    first = seeded(engine, **padded("llama"), return_dict_in_generate=True)
    whole = torch.cat((first.sequences, inputs(BY_NAME["llama"], batch=3, tokens=14, seed=3)["input_ids"]), dim=1)
    more = whole.shape[1] - PROMPT
    mask = torch.cat((padded("llama")["attention_mask"], torch.ones(3, more, dtype=torch.long)), dim=1)
    exact = seeded(original, whole, attention_mask=mask)
    monkeypatch.setattr(loop, "PART_TOKENS", 15)
    with counted(engine.module) as tokens:
        found = seeded(engine, whole, attention_mask=mask, past_key_values=first.past_key_values)
    assert torch.equal(found, exact)
    assert sum(tokens[: -NEW + 1]) == 15


BY_KIND = {"full_attention": {"rope_type": "dynamic", "factor": 2.0}, "sliding_attention": {"rope_type": "default"}}
DEPENDING = {"llama-dynamic": {}, "llama-longrope": {}, "phi3": {}, "gemma3": {"rope_parameters": BY_KIND}}


@pytest.mark.parametrize("name", DEPENDING)
def test_frequencies_that_depend_on_the_length_need_the_whole_prompt(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = infuse.init_inference(BY_NAME[name].make(**DEPENDING[name]), dtype="fp32", verify="off")
    monkeypatch.setattr(loop, "PART_TOKENS", 4)
    with counted(engine.module) as tokens:
        generated(engine, name)
    assert tokens[0] == PROMPT


# ---- what our own loop follows, and what it must not miss ----


def generated(model: Any, name: str = "llama", batch: int = 2, **asked: Any) -> Tensor:
    return seeded(model, **inputs(BY_NAME[name], batch, PROMPT), **{"max_new_tokens": 12, "do_sample": False, **asked})


class After(Collected):
    """A streamer that does something once, after so many tokens."""

    def __init__(self, tokens: int, act: Callable[[], Any]):
        super().__init__()
        self.left, self.act = tokens + 1, act  # the prompt is put first

    def put(self, value: Tensor) -> None:
        self.left -= 1
        if not self.left:
            self.act()


@pytest.mark.parametrize("name", ["llama-dynamic", "llama-longrope", "phi3", "gpt-neox"])
def test_answers_beyond_the_positions_of_the_config(name: str) -> None:
    original, engine = BY_NAME[name].make(), infuse.init_inference(BY_NAME[name].make(), dtype="fp32")
    assert torch.equal(generated(engine, name, max_new_tokens=140), generated(original, name, max_new_tokens=140))


@pytest.mark.parametrize("window", [PROMPT + 12, PROMPT + 6, 6])
@pytest.mark.parametrize("name", ["mistral", "starcoder2"])
def test_a_sliding_window_that_is_reached_during_the_answer(name: str, window: int) -> None:
    make = BY_NAME[name].make
    original, engine = make(sliding_window=window), infuse.init_inference(make(sliding_window=window), dtype="fp32")
    assert torch.equal(generated(engine, name), generated(original, name))
    embedded = original.get_input_embeddings()(inputs(BY_NAME[name], 2, PROMPT)["input_ids"]).detach()
    asked: dict[str, Any] = dict(inputs_embeds=embedded, do_sample=False)
    assert torch.equal(seeded(engine, **asked), seeded(original, **asked))


def test_prefix_tuning_brings_a_cache_of_its_own() -> None:
    """PEFT puts it in the place of ours when the prompt is prepared, and asks ours for its length first."""
    found = []
    for model in (BY_NAME["llama"].make(), with_blocks(BY_NAME["llama"].make()).module):
        torch.manual_seed(6)
        tuned = get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
        given = inputs(BY_NAME["llama"], batch=2, tokens=7, padding="left")
        found.append(tuned.generate(**given, max_new_tokens=9, do_sample=False))
    assert torch.equal(*found)


def test_a_preparation_that_starts_over() -> None:
    """Phi3 drops its cache where the short frequencies end."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    short = PROMPT + 5
    changes = dict(
        original_max_position_embeddings=short, rope_parameters={**rope, "original_max_position_embeddings": short}
    )
    engine = infuse.init_inference(BY_NAME["phi3"].make(**changes), dtype="fp32")
    assert torch.equal(generated(engine, "phi3"), generated(BY_NAME["phi3"].make(**changes), "phi3"))


def test_a_preparation_of_the_models_own_is_asked_at_every_step() -> None:
    original, engine = pair("llama")
    model, calls = injected("llama").module, []
    prepare = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = lambda *args, **kwargs: calls.append(1) or prepare(*args, **kwargs)
    assert torch.equal(generated(model), generated(original)) and len(calls) == 12


AFTER, BEFORE = "register_forward_hook", "register_forward_pre_hook"


@pytest.mark.parametrize(
    ("which", "at", "kind"),
    [("", 0, AFTER), ("", 6, BEFORE), ("model", 1, AFTER), ("model", 0, BEFORE), ("model.layers.1", 6, AFTER),
     ("model.layers.1", 1, BEFORE), ("lm_head", 1, AFTER), ("lm_head", 6, BEFORE)],
)  # fmt: skip
def test_hooks_are_called_at_every_step_from_when_they_are_put_on(which: str, at: int, kind: str) -> None:
    engine = injected("llama")
    heard: list[object] = []
    module = engine.module.get_submodule(which)

    def listen() -> None:
        getattr(module, kind)(lambda *_: heard.append(1))

    found = generated(engine, batch=1, streamer=After(at, listen))
    assert torch.equal(found, generated(pair("llama")[0], batch=1)) and len(heard) == 12 - at


@pytest.mark.parametrize("at", [1, 3, 6])
def test_a_module_that_is_replaced_during_the_answer_is_used(at: int) -> None:
    def replaced(model: Any) -> Tensor:
        head = nn.Linear(48, 96, bias=False)
        head.weight.data.copy_(torch.linspace(-1, 1, 48 * 96).sin().view(96, 48))
        return generated(model, batch=1, streamer=After(at, lambda: setattr(model, "lm_head", head)))

    found, exact, unchanged = (
        replaced(injected("llama").module),
        replaced(made("llama")),
        generated(made("llama"), batch=1),
    )
    assert torch.equal(found, exact) and not torch.equal(found, unchanged)


def generate(model: Any, **asked: Any) -> Tensor:
    return seeded(model, **inputs(BY_NAME["llama"], batch=3, tokens=PROMPT), **asked)


class Plus(t.LogitsProcessor):
    """Changes the scores where they are, and keeps them."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append((input_ids.shape[1], scores.shape[0]))
        scores[:, input_ids.shape[1] % 7 :: 7] += 100
        return scores


class Asks(t.LogitsProcessor):
    """Wants to know more than `generate` tells."""

    def __call__(self, input_ids: Tensor, scores: Tensor, how: str) -> Tensor:
        return scores


class Optional(t.LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor, how: str = "") -> Tensor:
        return scores


def test_scores_may_be_changed_in_place() -> None:
    """They are the processor's own: what the head has returned stays as it is."""
    original, engine = pair("llama")
    returned: list[tuple[Tensor, Tensor]] = []
    handle = engine.module.lm_head.register_forward_hook(
        lambda module, args, output: returned.append((output, output.clone()))
    )
    plus = Plus()
    found = generate(engine, logits_processor=LogitsProcessorList([plus]))
    handle.remove()
    assert torch.equal(found, generate(original, logits_processor=LogitsProcessorList([Plus()])))
    assert plus.seen == [(PROMPT + new, 3) for new in range(NEW)]
    assert len(returned) == NEW and all(torch.equal(*pair) for pair in returned)


@pytest.mark.parametrize("wrong", [Asks, Optional])
def test_a_processor_that_asks_for_more_is_refused_as_ever(wrong: type) -> None:
    told = []
    for model in pair("llama"):
        with pytest.raises(ValueError, match="required parameters") as caught:
            generate(model, logits_processor=LogitsProcessorList([Plus(), wrong()]))
        told.append(str(caught.value))
    assert told[0] == told[1]


def test_signatures_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine = pair("llama")
    read: list[object] = []
    signature = inspect.signature
    monkeypatch.setattr(
        inspect, "signature", lambda *args, **kwargs: read.append(args[0]) or signature(*args, **kwargs)
    )
    counts = []
    for new in (6, 12):
        read.clear()
        generate(engine, repetition_penalty=1.5, no_repeat_ngram_size=2, max_new_tokens=new)
        counts.append(len([one for one in read if isinstance(getattr(one, "__self__", None), t.LogitsProcessor)]))
    assert counts == [2, 2]


@pytest.mark.parametrize("ends", [[2], [0, 5, 39], [5, 40, 7], [50], 4], ids=str)
@pytest.mark.parametrize("length", [8, 11, 12, 20])
def test_fewest_new_tokens(ends: list[int] | int, length: int) -> None:
    """Our own way of it; an end beyond the vocabulary is none."""
    processor = MinNewTokensLengthLogitsProcessor(8, 4, torch.tensor(ends))
    scores, ids = torch.randn(3, 40), torch.zeros(3, length, dtype=torch.long)
    given = scores.clone()
    assert torch.equal(Processed(LogitsProcessorList([processor]))(ids, scores), processor(ids, given.clone()))
    assert torch.equal(scores, given)


def test_a_list_that_is_more_than_a_list() -> None:
    class Doubled(LogitsProcessorList):
        def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
            return super().__call__(input_ids, scores, **kwargs) * 2

    scores = torch.randn(2, 40)
    assert torch.equal(Processed(Doubled([t.InfNanRemoveLogitsProcessor()]))(torch.zeros(2, 3), scores), scores * 2)


def test_a_processor_that_is_added_later_is_asked() -> None:
    processors = LogitsProcessorList([Plus()])
    processed, ids, scores = Processed(processors), torch.zeros(1, 3), torch.zeros(1, 40)
    once = processed(ids, scores.clone())
    processors.append(Plus())
    assert torch.equal(processed(ids, scores.clone()), once * 2)


class Capital(EosTokenCriteria):
    """Somebody's own: ends at the second of its tokens only."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        ends = super().__call__(input_ids, scores)
        return ends & (input_ids.shape[1] > PROMPT + 3)


class Shorter(MaxLengthCriteria):
    """Somebody's own, with a length of its own."""


def test_criteria() -> None:
    own, shorter = Capital([7]), Shorter(4)
    ends = [EosTokenCriteria([2, 3]), EosTokenCriteria(5), EosTokenCriteria(torch.tensor(6))]
    assert ends_of([MaxLengthCriteria(9), own, shorter, *ends]) == (9, {2, 3, 5, 6}, [own, shorter])
    assert ends_of([]) == (None, set(), [])


@pytest.mark.parametrize(
    "criteria",
    [[Shorter(PROMPT + 4)], [MaxLengthCriteria(PROMPT + 6), MaxLengthCriteria(PROMPT + 4)], [StopAtLength(PROMPT + 3)]],
    ids=["of one's own", "two lengths", "row by row"],
)
def test_the_shortest_length_counts(criteria: list) -> None:
    asked: dict[str, Any] = dict(stopping_criteria=t.StoppingCriteriaList(criteria), pad_token_id=0)
    exact, found = (generate(model, **asked) for model in pair("llama"))
    assert torch.equal(found, exact) and PROMPT + 4 <= exact.shape[1] < PROMPT + NEW


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_ends(own: bool, batch: int) -> None:
    """Each row ends at another token; of a criterion of somebody's own, transformers pads what comes after, too."""
    original, engine = pair("llama")
    given = inputs(BY_NAME["llama"], batch=batch, tokens=PROMPT)
    rows = original.generate(**given, max_new_tokens=NEW)[:, PROMPT:].tolist()
    ends = sorted({row[2 + 2 * i] for i, row in enumerate(rows)})
    asked: dict[str, Any] = dict(eos_token_id=ends, pad_token_id=1)
    if own:
        asked = dict(stopping_criteria=t.StoppingCriteriaList([Capital(ends)]), pad_token_id=1)
    exact = original.generate(**given, max_new_tokens=NEW, **asked)
    assert torch.equal(engine.generate(**given, max_new_tokens=NEW, **asked), exact)
    assert exact.shape[1] < PROMPT + NEW or (exact == 1).any()
