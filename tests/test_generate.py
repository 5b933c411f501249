"""Every way to generate gives the original's tokens in float32, on padded batches: by the engine and by its module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch
import transformers as t
from asked_of_generate import OddTokensOnly, StopAtLength
from families import BY_NAME, inputs
from torch import Tensor, nn

import infuse
from infuse.layers.cache import KVCache

NAMES = ("llama", "gpt2", "bloom")
PROMPT, NEW = 9, 10
Generate = Callable[..., Any]

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
    engine = infuse.init_inference(made(name), dtype="fp32")
    assert {step.depth for step in engine.plan.steps if "layer" in step.path or ".h." in step.path} <= {
        "block"
    } and engine.plan.steps
    return engine


@pytest.fixture(params=["engine", "module"])
def face(request: pytest.FixtureRequest) -> Callable[[infuse.InferenceEngine], Any]:
    """The two things that people call `generate` on."""
    return {"engine": lambda engine: engine, "module": lambda engine: engine.module}[request.param]


def padded(name: str, batch: int = 3, tokens: int = PROMPT) -> dict[str, Tensor]:
    return inputs(BY_NAME[name], batch=batch, tokens=tokens, padding="left", seed=11)


def seeded(model: Any, *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(5)
    return model.generate(*args, **{"max_new_tokens": NEW, **kwargs})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_modes(name: str, mode: str, face: Callable) -> None:
    original, engine = pair(name)
    exact = seeded(original, **padded(name), **MODES[mode])
    assert exact.shape[1] > PROMPT
    assert torch.equal(seeded(face(engine), **padded(name), **MODES[mode]), exact)


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


@pytest.mark.parametrize("name", ["contrastive search", "group beam search"])
def test_modes_that_left_transformers(name: str, face: Callable) -> None:
    """Where transformers still has them in itself they must be equal; since 5 their code is on its hub."""
    original, engine = pair("llama")
    asked: dict[str, Any] = {
        "contrastive search": dict(penalty_alpha=0.6, top_k=4),
        "group beam search": dict(num_beams=4, num_beam_groups=2, diversity_penalty=0.5),
    }[name]
    try:
        exact = seeded(original, **padded("llama"), **asked)
    except ValueError as error:
        with pytest.raises(ValueError, match="trust_remote_code"):  # ours says what transformers' own says
            seeded(face(engine), **padded("llama"), **asked)
        pytest.skip(f"transformers {t.__version__} has no {name}: {error}")
    assert torch.equal(seeded(face(engine), **padded("llama"), **asked), exact)


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_end_at_different_times(name: str, face: Callable) -> None:
    original, engine = pair(name)
    rows = seeded(original, **padded(name))[:, PROMPT:].tolist()

    def lengths(ends: tuple[int, ...]) -> set[int]:
        return {next((at for at, token in enumerate(row) if token in ends), NEW) for row in rows}

    ends = max(combinations(sorted({token for row in rows for token in row}), 2), key=lambda pair: len(lengths(pair)))
    assert len(lengths(ends)) > 1, "the rows were to end at different times"
    exact = seeded(original, **padded(name), eos_token_id=list(ends), pad_token_id=0)
    assert torch.equal(seeded(face(engine), **padded(name), eos_token_id=list(ends), pad_token_id=0), exact)


@pytest.mark.parametrize("name", NAMES)
def test_min_new_tokens(name: str, face: Callable) -> None:
    original, engine = pair(name)
    first = seeded(original, **padded(name))[:, PROMPT].tolist()
    asked = dict(eos_token_id=first, pad_token_id=0, min_new_tokens=4)
    exact = seeded(original, **padded(name), **asked)
    assert exact.shape[1] >= PROMPT + 4 and not torch.equal(
        exact, seeded(original, **padded(name), eos_token_id=first, pad_token_id=0)
    )
    assert torch.equal(seeded(face(engine), **padded(name), **asked), exact)


# ---- speculation: transformers does it for one row ----


def one_row(name: str) -> dict[str, Tensor]:
    return inputs(BY_NAME[name], batch=1, tokens=PROMPT, seed=12)


@pytest.mark.parametrize("injected", [False, True], ids=["plain assistant", "injected assistant"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_assisted(name: str, injected: bool, face: Callable) -> None:
    """The tokens are those of the model alone, whatever the assistant proposes; it is asked, and some proposals are
    taken.
    """
    original, engine = pair(name)
    assistant: Any = made(name)  # the same weights, then disturbed a little: right sometimes
    with torch.no_grad():
        assistant.get_output_embeddings().weight.add_(0.4 * torch.randn(96, 48))
    if injected:
        assistant = infuse.init_inference(assistant, dtype="fp32")
    exact = seeded(original, **one_row(name), max_new_tokens=24)
    with counted(assistant.module if injected else assistant) as asked, counted(engine.module) as own:
        found = seeded(face(engine), **one_row(name), assistant_model=assistant, max_new_tokens=24)
    assert torch.equal(found, exact)
    assert len(asked) > 1 and len(own) < 24


@pytest.mark.parametrize("name", NAMES)
def test_prompt_lookup(name: str, face: Callable) -> None:
    original, engine = pair(name)
    exact = seeded(original, **one_row(name), max_new_tokens=24)
    assert torch.equal(seeded(face(engine), **one_row(name), prompt_lookup_num_tokens=3, max_new_tokens=24), exact)


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


def test_logits_processor(face: Callable) -> None:
    original, engine = pair("llama")
    processors = t.LogitsProcessorList([OddTokensOnly()])
    exact = seeded(original, **padded("llama"), logits_processor=processors)
    assert (exact[:, PROMPT:] % 2 == 1).all()
    assert torch.equal(seeded(face(engine), **padded("llama"), logits_processor=processors), exact)


def test_stopping_criteria(face: Callable) -> None:
    original, engine = pair("llama")
    criteria = t.StoppingCriteriaList([StopAtLength(PROMPT + 3)])
    exact = seeded(original, **padded("llama"), stopping_criteria=criteria, pad_token_id=0)
    assert exact.shape[1] == PROMPT + 5
    assert torch.equal(seeded(face(engine), **padded("llama"), stopping_criteria=criteria, pad_token_id=0), exact)


@pytest.mark.parametrize("mode", [dict(), dict(do_sample=True)], ids=["greedy", "sampling"])
def test_streamer(mode: dict[str, Any], face: Callable) -> None:
    original, engine = pair("llama")
    exact = seeded(original, **one_row("llama"), **mode)
    streamer = Collected()
    seeded(face(engine), **one_row("llama"), streamer=streamer, **mode)
    assert streamer.tokens == exact[0].tolist() and streamer.ended == 1


def test_custom_loop(face: Callable) -> None:
    """The caller's own loop, through transformers' `custom_generate`."""

    def least_likely(model: Any, input_ids: Tensor, generation_config: Any, **kwargs: Any) -> Tensor:
        for _ in range(4):
            input_ids = torch.cat((input_ids, model(input_ids).logits[:, -1:].argmin(-1)), dim=1)
        return input_ids

    original, engine = pair("llama")
    exact = original.generate(**one_row("llama"), custom_generate=least_likely)
    assert exact.shape[1] == PROMPT + 4
    assert torch.equal(face(engine).generate(**one_row("llama"), custom_generate=least_likely), exact)


@pytest.mark.parametrize("by", ["position", "keyword"])
def test_generation_config(by: str, face: Callable) -> None:
    original, engine = pair("llama")
    given, model = padded("llama"), face(engine)
    settings = t.GenerationConfig(max_new_tokens=7, repetition_penalty=1.5, pad_token_id=0, eos_token_id=None)
    exact = original.generate(given["input_ids"], settings, attention_mask=given["attention_mask"])
    assert exact.shape[1] == PROMPT + 7
    if by == "position":
        found = model.generate(given["input_ids"], settings, attention_mask=given["attention_mask"])
    else:
        found = model.generate(given["input_ids"], generation_config=settings, attention_mask=given["attention_mask"])
    assert torch.equal(found, exact)


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
def test_prompt_of_embeddings(name: str, face: Callable) -> None:
    original, engine = pair(name)
    given = padded(name)
    embedded = original.get_input_embeddings()(given["input_ids"]).detach() * 1.1  # no row of the table
    asked = dict(inputs_embeds=embedded, attention_mask=given["attention_mask"])
    exact = seeded(original, **asked)
    assert exact.shape[1] == NEW
    assert torch.equal(seeded(face(engine), **asked), exact)


@pytest.mark.parametrize("name", NAMES)
def test_prompt_of_one_token(name: str, face: Callable) -> None:
    original, engine = pair(name)
    ids = inputs(BY_NAME[name], batch=2, tokens=1)["input_ids"]
    assert torch.equal(seeded(face(engine), ids), seeded(original, ids))


@pytest.mark.parametrize("name", NAMES)
def test_second_turn_on_the_returned_cache(name: str, face: Callable) -> None:
    """The returned cache holds all but the last token, and the second turn computes only what is new."""
    original, engine = pair(name)
    given, more = padded(name), inputs(BY_NAME[name], batch=3, tokens=4, seed=13)["input_ids"]
    exact, found = (seeded(model, **given, return_dict_in_generate=True) for model in (original, face(engine)))
    assert isinstance(found.past_key_values, KVCache)
    assert found.past_key_values.get_seq_length() == PROMPT + NEW - 1
    whole = torch.cat((exact.sequences, more), dim=1)
    mask = torch.cat((given["attention_mask"], torch.ones(3, NEW + 4, dtype=torch.long)), dim=1)
    with counted(engine.module) as tokens:
        second = seeded(face(engine), whole, attention_mask=mask, past_key_values=found.past_key_values)
    assert tokens == [5] + [1] * (NEW - 1)
    assert torch.equal(second, seeded(original, whole, attention_mask=mask))
    assert torch.equal(second, seeded(original, whole, attention_mask=mask, past_key_values=exact.past_key_values))


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


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize("at", [0, 1, 6])
@pytest.mark.parametrize("which", ["", "model", "model.layers.1", "lm_head"])
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
