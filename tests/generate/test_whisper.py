"""Answers through transformers' own entry points: Whisper's long sounds, times and languages, its pipeline, and the
ways to ask a translator for an answer. Each gives what the original gives.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, StoppingCriteria, StoppingCriteriaList
from transformers.generation import LogitsProcessor

import infuse
from infuse.ground.cache_names import cache_argument, cache_in
from infuse.layers.block import Block
from infuse.layers.native.stack import DecodeSession
from infuse.native import kernels
from tests.models.encoder_decoders import BY_NAME, encoded, made
from tests.models.whisper import END, FALLBACK, FRAMES, ID, SPECIAL, TIMES, sounds, whisper
from tests.support.same_results import assert_same

NAME: Any = cache_argument(t.BartForConditionalGeneration.forward)


def injected(original: Any) -> Any:
    """A copy of the model whose layers are blocks."""
    model = infuse.init_inference(copy.deepcopy(original), dtype="fp32", progress=False).module
    layers = sum(type(part).__name__.endswith(("Layer", "T5Block")) for part in original.modules())
    assert sum(isinstance(part, Block) for part in model.modules()) == layers > 1
    return model


@cache
def pair(**how: Any) -> tuple[Any, Any]:
    """An original and the injected model."""
    return (original := whisper(**how)), injected(original)


@cache
def text_pair(name: str) -> tuple[Any, Any]:
    return (original := made(BY_NAME[name])), injected(original)


def answers(models: tuple[Any, ...], asked: Callable[[], dict[str, Any]] | dict[str, Any], **given: Any) -> list[Any]:
    """What the original says, and what ours says, from the same seed. Settings that keep a state are made anew."""
    said = []
    for model in models:
        torch.manual_seed(5)
        kwargs = asked() if callable(asked) else copy.deepcopy(asked)
        said.append(model.generate(**{"max_new_tokens": 20} | given | kwargs))
    return said


def agree(models: tuple[Any, ...], asked: Callable[[], dict[str, Any]] | dict[str, Any], **given: Any) -> Any:
    """The answer of both, which is the same."""
    exact, found = answers(models, asked, **given)
    assert type(found) is type(exact)
    assert_same(found, exact)
    return exact


class Louder(LogitsProcessor):
    """A processor of the user's: one word becomes likelier with each token."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, 70] += ids.shape[1] / 4
        return scores


class Until(StoppingCriteria):
    """Ends, at each third length, the rows that hold a token twice."""

    def __call__(self, ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        twice = torch.tensor([len(set(row)) < len(row) for row in ids.tolist()])
        return twice & torch.tensor(ids.shape[1] % 3 == 0)


class Collector:
    """A streamer of the user's."""

    def __init__(self) -> None:
        self.put_in: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.put_in.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def outcome(model: Any, *args: Any, **asked: Any) -> Any:
    """What a model says, or why it does not."""
    try:
        return model.generate(*args, **asked)
    except Exception as error:
        return type(error), str(error)


def config_of(model: Any, **changes: Any) -> Any:
    """A copy of the model's generation config, changed."""
    config = copy.deepcopy(model.generation_config)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


PROMPT = torch.tensor([ID["<|startofprev|>"], 70, 71, 72])
LONG: dict[str, dict[str, Any]] = {
    "a language": dict(language="en"),
    "languages heard": {},
    "languages of each": dict(language=["en", "french", "<|de|>"], task="translate"),
    "after what was said": dict(condition_on_prev_tokens=True),
    "a prompt": dict(prompt_ids=PROMPT),
    "a prompt for each window": dict(
        prompt_ids=PROMPT, prompt_condition_type="all-segments", condition_on_prev_tokens=True
    ),
    "warmer where it fails": FALLBACK,
    "warmer, after what was said": dict(FALLBACK, condition_on_prev_tokens=True, temperature=(0.0, 0.4, 0.8)),
    "silence": dict(FALLBACK, no_speech_threshold=0.0025),
    "beams": dict(num_beams=3),
    "beams, then warmer": dict(FALLBACK, num_beams=2),
    "beams after what was said": dict(num_beams=2, condition_on_prev_tokens=True),
    "times of tokens": dict(return_token_timestamps=True, language="de"),
    "scores of each window": dict(return_dict_in_generate=True, output_scores=True),
    "static": dict(cache_implementation="static"),
    "no cache": dict(use_cache=False),
    "penalties": dict(repetition_penalty=1.3, no_repeat_ngram_size=3),
    "a processor": dict(logits_processor=[Louder()]),
    "criteria": dict(stopping_criteria=StoppingCriteriaList([Until()])),
    "allowed tokens": dict(prefix_allowed_tokens_fn=lambda row, ids: [*range(40 * row, 160), *range(END, TIMES + 101)]),
}  # fmt: skip


@pytest.mark.parametrize("way", LONG)
def test_sounds_longer_than_a_window(way: str) -> None:
    """Sounds of different length, one of which ends windows before the others do."""
    models = copy.deepcopy(pair()) if "return_token_timestamps" in LONG[way] else pair()
    given = sounds(470, 3 * FRAMES, 150)
    said = agree(models, LONG[way], **given, return_timestamps=True, return_segments=True)
    segments = said["segments"]
    assert len(segments) == 3 and any(float(segment["start"]) >= 2 for each in segments for segment in each)


def test_a_warmer_answer_is_another_one() -> None:
    """The settings that the tests above share reach what they are for."""
    given = dict(**sounds(470, 3 * FRAMES, 150), return_timestamps=True)
    original, _ = pair()
    plain, warmer, silent = (answers((original,), asked, **given)[0].shape for asked in ({}, FALLBACK, LONG["silence"]))
    assert len({plain, warmer, silent}) == 3


def test_one_long_sound_without_a_mask_and_its_progress() -> None:
    heard: list[list[Any]] = []

    def asked() -> dict[str, Any]:
        heard.append([])
        return dict(monitor_progress=lambda seen: heard[-1].append(seen.tolist()))

    features = sounds(1100)["input_features"]
    agree(pair(), asked, input_features=features, return_timestamps=True)
    assert heard[0] == heard[1] and len(heard[0]) >= 6


def test_windows_of_30_seconds() -> None:
    """Sizes of the released models: 3000 frames, 1500 states, 1501 times."""
    models = pair(states=1500, encoder_layers=1)
    asked = dict(language="en", condition_on_prev_tokens=True)
    said = agree(models, asked, **sounds(5200, 3500), return_timestamps=True, return_segments=True)
    assert float(said["segments"][0][-1]["end"]) > 40


@pytest.mark.skipif(isinstance(kernels(), str), reason=str(kernels()))
@pytest.mark.parametrize("beams", [1, 2])
def test_steps_in_each_window_are_made_in_one_call(beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after the batch has become smaller; not behind a mask over what was said before, which hides padding."""
    made_at: list[int] = []
    step = DecodeSession.step

    def noted(self: DecodeSession, x: Tensor, *args: Any) -> Tensor | None:
        out = step(self, x, *args)
        made_at.extend([len(x)] if out is not None else [])
        return out

    monkeypatch.setattr(DecodeSession, "step", noted)
    asked: dict[str, Any] = dict(**sounds(470, 150), return_timestamps=True, max_new_tokens=12, num_beams=beams)
    pair()[1].generate(**asked)
    assert set(made_at) == {beams, 2 * beams}


SHORT: dict[str, dict[str, Any]] = {
    "text": dict(language="en"),
    "heard": {},
    "translated": dict(task="translate", language="german"),
    "times": dict(return_timestamps=True),
    "segments": dict(return_timestamps=True, return_segments=True),
    "times of tokens": dict(return_token_timestamps=True),
    "times of both": dict(return_token_timestamps=True, return_timestamps=True, return_segments=True),
    "times of tokens of beams": dict(return_token_timestamps=True, num_beams=3),
    "times of tokens of some beams": dict(return_token_timestamps=True, num_beams=4, num_return_sequences=2),
    "times after a prompt": dict(return_token_timestamps=True, prompt_ids=PROMPT, language="fr"),
    "beams": dict(num_beams=3, return_timestamps=True, length_penalty=0.5),
    "beams and scores": dict(num_beams=3, return_dict_in_generate=True, output_scores=True),
    "samples": dict(temperature=0.7, do_sample=True, num_return_sequences=2),
    "warmer": dict(FALLBACK, temperature=(0.0, 0.3, 0.6), return_timestamps=True),
    "warmer, no times": dict(FALLBACK),
    "everything": dict(
        return_dict_in_generate=True, output_scores=True, output_logits=True, output_hidden_states=True, language="en"
    ),
    "one call": dict(force_unique_generate_call=True, return_timestamps=True),
    "own config": dict(generation_config=dict(num_beams=2, suppress_tokens=[70, 71])),
    "static": dict(cache_implementation="static"),
    "no cache": dict(use_cache=False),
    "forced tokens": dict(generation_config=dict(forced_decoder_ids=[[1, 259], [2, 262]])),
    "own strings": dict(stop_strings=["m", "x"], tokenizer=None),
    "all places": dict(max_length=64, max_new_tokens=None, return_timestamps=True),
    "tokens of the decoder": dict(decoder_input_ids=torch.tensor([[257, 258, 262, 266, 70]] * 2)),
}


@pytest.mark.parametrize("way", SHORT)
def test_sounds_of_one_window(way: str) -> None:
    asked = dict(SHORT[way])
    # Asked for times of tokens, transformers sets another attention function for good.
    models = copy.deepcopy(pair()) if "return_token_timestamps" in asked else pair()
    if "generation_config" in asked:
        asked["generation_config"] = config_of(models[0], **asked["generation_config"])
    if "tokenizer" in asked:
        asked["tokenizer"] = tokenizer()
    given = sounds(FRAMES, FRAMES)
    if "num_return_sequences" in asked:
        del given["attention_mask"]  # transformers counts its frames once for each sound, not for each answer
    agree(models, asked, **given)


def test_times_of_tokens_of_sounds_of_different_length() -> None:
    """The mask says how many frames count. The call sets another attention function, and the next answer is right."""
    models = copy.deepcopy(pair())
    given = sounds(FRAMES, 90)
    said = agree(models, {}, **given, return_token_timestamps=True)
    assert float(said["token_timestamps"][1].max()) <= 0.9
    assert not torch.equal(said["token_timestamps"], agree(models, {}, return_token_timestamps=True,
                           input_features=given["input_features"])["token_timestamps"])  # fmt: skip
    agree(models, {}, **given)
    agree(models, {}, **given, num_beams=2)


def test_languages() -> None:
    original, ours = pair()
    given = sounds(FRAMES, FRAMES, FRAMES, FRAMES, seed=3)["input_features"]
    exact, found = (model.detect_language(given) for model in (original, ours))
    assert torch.equal(found, exact) and set(exact.tolist()) <= set(original.generation_config.lang_to_id.values())
    with torch.no_grad():
        states = [model.get_encoder()(given) for model in (original, ours)]
    exact, found = (model.detect_language(encoder_outputs=each) for model, each in zip(pair(), states, strict=True))
    assert torch.equal(found, exact)


REFUSED_SOUNDS: dict[str, dict[str, Any]] = {
    "a long sound without times": dict(**sounds(500), return_timestamps=False),
    "long sounds without a mask": dict(input_features=sounds(500, 500)["input_features"], attention_mask=None),
    "a short window": dict(input_features=torch.zeros(1, 16, 150), attention_mask=None),
    "an unknown language": dict(language="klingon"),
    "a language of one language": dict(language="en", is_multilingual=False),
    "more than there are places": dict(max_new_tokens=100),
    "a prompt for each window": dict(prompt_condition_type="all-segments"),
    "a stream of beams": dict(num_beams=2, streamer=Collector()),
    "groups of beams": dict(num_beams=4, num_beam_groups=2, diversity_penalty=0.5),
    "contrastive search": dict(penalty_alpha=0.6, top_k=4),
}


@pytest.mark.parametrize("way", REFUSED_SOUNDS)
def test_what_whisper_refuses(way: str) -> None:
    asked = {"max_new_tokens": 6, **sounds(FRAMES)} | REFUSED_SOUNDS[way]
    exact, found = (outcome(model, **copy.deepcopy(asked)) for model in pair())
    assert isinstance(exact, tuple)
    assert_same(found, exact)


@pytest.mark.parametrize(
    "asked", [{"num_beams": 2}, {"num_beams": 2, "num_beam_groups": 2}, {"penalty_alpha": 0.6, "top_k": 4}], ids=str
)
def test_a_config_by_position(asked: dict[str, Any]) -> None:
    exact, found = (
        outcome(model, sounds(FRAMES)["input_features"], config_of(model, max_new_tokens=6, **asked))
        for model in pair()
    )  # fmt: skip
    assert isinstance(exact, tuple) == (len(asked) == 2)
    assert_same(found, exact)


def test_states_that_the_user_has() -> None:
    original, _ = models = pair()
    with torch.no_grad():
        states = original.get_encoder()(sounds(FRAMES, FRAMES)["input_features"])
    for asked in ({"language": "en"}, {"num_beams": 3}, {"temperature": 0.6}):
        # Copied for each answer, because transformers repeats them for beams in place.
        said = agree(models, {**asked, "encoder_outputs": states})
        assert torch.equal(said, answers((original,), asked, **sounds(FRAMES, FRAMES))[0])


def near(original: Any) -> Any:
    """An assistant whose candidates are often, but not always right."""
    assistant, generator = copy.deepcopy(original), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in assistant.model.decoder.layers.parameters():
            weight.mul_(1 + 0.3 * torch.randn(weight.shape, generator=generator))
    assistant.generation_config.assistant_confidence_threshold = 0.0
    assistant.generation_config.num_assistant_tokens = 3
    return assistant


@pytest.mark.slow
@pytest.mark.parametrize("injects", [False, True])
@pytest.mark.parametrize("frames", [FRAMES, 330])
def test_an_assistant(injects: bool, frames: int) -> None:
    original, ours = pair()
    assistants = near(original), injected(near(original)) if injects else near(original)
    asked = dict(language="fr", max_new_tokens=9, return_timestamps=frames > FRAMES)
    said, steps = [], []
    for model, assistant in zip((original, ours), assistants, strict=True):
        steps.append(0)

        def counted(*args: Any) -> None:
            steps[-1] += 1

        handle = model.model.decoder.register_forward_hook(counted)
        said.append(model.generate(**sounds(frames), **asked, assistant_model=assistant))
        handle.remove()
    assert torch.equal(*said) and steps[0] == steps[1] and (frames > FRAMES or steps[0] < said[0].shape[1])


def test_an_assistant_that_reads_the_same_states() -> None:
    """A decoder alone, as distil-whisper's."""
    assistant = whisper(model=t.WhisperForCausalLM, decoder_layers=1)
    agree(pair(), {}, **sounds(FRAMES), assistant_model=assistant, language="en")


@pytest.mark.parametrize("asked", [{}, {"return_timestamps": True}, {"return_dict_in_generate": True}], ids=str)
def test_a_streamed_transcription(asked: dict[str, Any]) -> None:
    heard = [Collector(), Collector()]
    for model, streamer in zip(pair(), heard, strict=True):
        model.generate(**sounds(FRAMES), language="en", max_new_tokens=12, streamer=streamer, **asked)
    assert heard[0].put_in == heard[1].put_in and heard[0].ended == heard[1].ended and len(heard[0].put_in) > 5


# Whisper in the pipeline of speech recognition. This version of transformers has no pipelines from texts to texts.


def tokenizer() -> Any:
    """The words are the bytes, without merges."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), SPECIAL[0]]
    vocab = {word: index for index, word in enumerate(words)}
    made = t.WhisperTokenizer(vocab=vocab, merges=[], additional_special_tokens=SPECIAL[1:], pad_token=SPECIAL[0])
    assert made.convert_tokens_to_ids(SPECIAL) == [*ID.values()]
    return made


def recognizers() -> list[Any]:
    """Pipelines over windows of 2 s, the original's and ours."""
    extractor = t.WhisperFeatureExtractor(feature_size=16, chunk_length=FRAMES // 100)
    return [
        t.pipeline("automatic-speech-recognition", model=model, tokenizer=tokenizer(), feature_extractor=extractor)
        for model in copy.deepcopy(pair())
    ]


def waves(seconds: float, pitch: int = 40) -> np.ndarray:
    """A sound whose pitch and loudness change."""
    at = np.arange(int(16000 * seconds)) / 16000
    return (np.sin(at * 2000 * (1 + np.sin(at * pitch / 7))) * np.abs(np.sin(at * pitch / 9))).astype(np.float32)


RECOGNIZED: dict[str, dict[str, Any]] = {
    "text": {},
    "greedy": dict(generate_kwargs={"num_beams": 1}),
    "times": dict(return_timestamps=True),
    "words": dict(return_timestamps="word", generate_kwargs={"num_beams": 1}),
    "words of beams": dict(return_timestamps="word"),
    "languages": dict(return_timestamps=True, return_language=True),
    "translated": dict(generate_kwargs={"task": "translate", "language": "fr"}),
    "chunks": dict(chunk_length_s=2, stride_length_s=0.4),
    "chunks and times": dict(chunk_length_s=2, return_timestamps=True, batch_size=3),
    "chunks and words": dict(chunk_length_s=2, return_timestamps="word", generate_kwargs={"num_beams": 1}),
    "warmer": dict(return_timestamps=True, generate_kwargs=FALLBACK | {"num_beams": 1}),
}


@pytest.mark.parametrize("seconds", [1.5, 5.0])
@pytest.mark.parametrize("way", RECOGNIZED)
def test_the_pipeline(way: str, seconds: float) -> None:
    asked = dict(RECOGNIZED[way])
    asked["generate_kwargs"] = {"max_new_tokens": 20} | asked.get("generate_kwargs", {})
    if seconds > 2 and "chunk_length_s" not in asked:
        asked.setdefault("return_timestamps", True)
    heard = []
    for recognizer in recognizers():
        torch.manual_seed(5)
        heard.append(recognizer(waves(seconds), **copy.deepcopy(asked)))
    assert heard[0] == heard[1] and len(heard[0]["text"]) > 3


def test_a_pipeline_of_several_sounds_whose_model_is_an_engine() -> None:
    heard = []
    for recognizer in (pipelines := recognizers()):
        if recognizer is pipelines[1]:
            recognizer.model = infuse.init_inference(pipelines[0].model, dtype="fp32", progress=False)
        given = [{"raw": waves(1.2, pitch), "sampling_rate": 16000} for pitch in (20, 40, 60)]
        heard.append(recognizer(given, batch_size=2, return_timestamps="word", generate_kwargs={"max_new_tokens": 9}))
    assert heard[0] == heard[1] and len(heard[0]) == 3


# Texts: what test_encoder_decoders.py does not ask for.

by_text = pytest.mark.parametrize("name", ["marian", "t5", "bart"])
TEXT: dict[str, dict[str, Any]] = {
    "beams that stop early": dict(num_beams=4, early_stopping=True, eos_token_id=5, num_return_sequences=2),
    "beams that go on": dict(num_beams=3, early_stopping="never", eos_token_id=[5, 9], length_penalty=-0.5),
    "samples": dict(do_sample=True, num_return_sequences=3, temperature=0.8),
    "few likely words": dict(do_sample=True, top_p=0.7, min_p=0.02, typical_p=0.9, epsilon_cutoff=1e-3, top_h=None),
    "at least": dict(min_new_tokens=7, eos_token_id=[*range(3, 40)]),
    "forced end": dict(forced_eos_token_id=2, num_beams=2),
    "words of the text": dict(encoder_repetition_penalty=1.6, encoder_no_repeat_ngram_size=2),
    "no word twice": dict(no_repeat_ngram_size=1, num_beams=2, repetition_penalty=1.2),
    "words that are not said": dict(suppress_tokens=[7, 8], begin_suppress_tokens=[9, 10, 11]),
    "likelier words": dict(sequence_bias=[[[7], -5.0], [[8, 9], 3.0]]),
    "an end that comes nearer": dict(exponential_decay_length_penalty=(4, 1.5), eos_token_id=5),
    "allowed words": dict(prefix_allowed_tokens_fn=lambda row, ids: [*range(3 + 9 * row, 40 + len(ids))]),
    "allowed words of beams": dict(prefix_allowed_tokens_fn=lambda row, ids: [7 + row, 30, len(ids)], num_beams=3),
    "a processor": dict(logits_processor=[Louder()]),
    "a processor, beams": dict(logits_processor=[Louder()], num_beams=2),
    "criteria": dict(stopping_criteria=StoppingCriteriaList([Until()])),
    "criteria, beams": dict(stopping_criteria=StoppingCriteriaList([Until()]), num_beams=2),
    "time enough": dict(max_time=1000.0),
    "a watermark": dict(watermarking_config=dict(bias=2.5, seeding_scheme="selfhash", context_width=2)),
    "a dynamic cache": dict(cache_implementation="dynamic", num_beams=2),
    "no cache, beams": dict(use_cache=False, num_beams=3),
    "static, beams": dict(cache_implementation="static", num_beams=3),
    "all of it": dict(return_dict_in_generate=True, output_scores=True, output_logits=True, output_hidden_states=True),
    "all of beams": dict(
        return_dict_in_generate=True, output_scores=True, output_logits=True, num_beams=3, num_return_sequences=2,
        renormalize_logits=True, eos_token_id=5,
    ),
    "scores, no cache": dict(return_dict_in_generate=True, output_scores=True, use_cache=False),
}  # fmt: skip


@by_text
@pytest.mark.parametrize("way", TEXT)
def test_ways_to_ask_for_a_text(name: str, way: str) -> None:
    agree(text_pair(name), TEXT[way], **encoded(BY_NAME[name], padding="right"), max_new_tokens=12)


@by_text
@pytest.mark.parametrize("asked", [{}, {"prompt_lookup_num_tokens": 3}, {"do_sample": True}], ids=str)
def test_one_text(name: str, asked: dict[str, Any]) -> None:
    agree(text_pair(name), asked, **encoded(BY_NAME[name], batch=1), max_new_tokens=14)


@by_text
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("padding", [None, "left"])
def test_states_of_a_text_that_the_user_has(name: str, beams: int, padding: str | None) -> None:
    original, _ = models = text_pair(name)
    given = encoded(BY_NAME[name], padding=padding)
    with torch.no_grad():
        states = original.get_encoder()(**given)
    asked = dict(attention_mask=given["attention_mask"], num_beams=beams)
    agree(models, {**asked, "encoder_outputs": states}, decoder_input_ids=torch.tensor([[2, 9]] * 3))
    wanted = agree(models, given, num_beams=beams)
    assert torch.equal(agree(models, {**asked, "encoder_outputs": states}), wanted)
    embedded = original.get_input_embeddings()(given["input_ids"]).detach()
    assert torch.equal(agree(models, {**asked, "inputs_embeds": embedded}), wanted)


@by_text
def test_probabilities_of_the_words_of_beams(name: str) -> None:
    models, given = text_pair(name), encoded(BY_NAME[name])
    asked = dict(return_dict_in_generate=True, output_scores=True, num_beams=3, eos_token_id=5)
    exact, found = (
        model.compute_transition_scores(said.sequences, said.scores, said.beam_indices, normalize_logits=True)
        for model, said in zip(models, answers(models, asked, **given), strict=True)
    )
    assert_same(found, exact)


@by_text
@pytest.mark.parametrize("asked", [{}, {"do_sample": True}, {"output_scores": True, "return_dict_in_generate": True}],
                         ids=str)  # fmt: skip
def test_a_streamed_text(name: str, asked: dict[str, Any]) -> None:
    heard = [Collector(), Collector()]
    for model, streamer in zip(text_pair(name), heard, strict=True):
        torch.manual_seed(5)
        model.generate(**encoded(BY_NAME[name], batch=1), max_new_tokens=9, streamer=streamer, **asked)
    assert heard[0].put_in == heard[1].put_in and heard[0].ended == heard[1].ended == 1
    assert [len(each) for each in heard[0].put_in] == [1] * 10


REFUSED: dict[str, dict[str, Any]] = {
    "contrastive search": dict(penalty_alpha=0.6, top_k=4),
    "groups of beams": dict(num_beams=4, num_beam_groups=2, diversity_penalty=0.5),
    "groups of beams in a config": dict(generation_config=t.GenerationConfig(num_beams=2, num_beam_groups=2)),
    "words that must be said": dict(force_words_ids=[[[7]]], num_beams=3),
    "contrasted layers": dict(dola_layers="low"),
    "a stream of beams": dict(num_beams=2, streamer=Collector()),
    "more answers than beams": dict(num_beams=2, num_return_sequences=3),
    "answers of no beams": dict(num_return_sequences=2),
    "an unknown argument": dict(penalty_alpa=0.6),
    "candidates of a batch": dict(prompt_lookup_num_tokens=3),
    "strings without a tokenizer": dict(stop_strings=["a"]),
    "an unknown cache": dict(cache_implementation="statik"),
    "no new tokens": dict(max_new_tokens=0),
}


@by_text
@pytest.mark.parametrize("way", REFUSED)
def test_what_the_original_refuses(name: str, way: str) -> None:
    asked = {"max_new_tokens": 6, **encoded(BY_NAME[name])} | REFUSED[way]
    exact, found = (outcome(model, **copy.deepcopy(asked)) for model in text_pair(name))
    assert isinstance(exact, tuple)
    assert_same(found, exact)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the original offloads")
def test_an_offloaded_cache_is_not_replaced() -> None:
    given = encoded(BY_NAME["marian"])
    exact, found = (outcome(model, **given, cache_implementation="offloaded") for model in text_pair("marian"))
    assert isinstance(exact, tuple)
    assert_same(found, exact)


def test_answers_within_inference_mode() -> None:
    """What they leave behind does not hinder answers outside of it."""
    for models, given in ((pair(), sounds(FRAMES)), (text_pair("t5"), encoded(BY_NAME["t5"]))):
        with torch.inference_mode():
            inside = agree(models, {"num_beams": 2}, **given)
        assert torch.equal(agree(models, {"num_beams": 2}, **given), inside)


@by_text
@pytest.mark.parametrize("users", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_an_answer_is_continued(name: str, users: bool, masked: bool) -> None:
    """With the cache of the first half of the answer: one of the user's, or the one that `generate` made. Only a mask
    tells transformers that the cache holds the tokens that are given; else it reads them again.
    """
    models, given = text_pair(name), encoded(BY_NAME[name], padding="right")
    whole, said = agree(models, given, max_new_tokens=12), []
    for model in models:
        with torch.no_grad():
            states = model.get_encoder()(**given)
        held = {NAME: EncoderDecoderCache(DynamicCache(), DynamicCache())} if users else {}
        asked = dict(encoder_outputs=states, attention_mask=given["attention_mask"], return_dict_in_generate=True)
        first = model.generate(**asked, **held, max_new_tokens=5)
        kept = cache_in(first)
        assert kept is not None and kept.get_seq_length() == 5
        more = {"decoder_attention_mask": torch.ones_like(first.sequences)} if masked else {}
        more |= {NAME: kept, "decoder_input_ids": first.sequences}
        said.append(model.generate(**asked, **more, max_new_tokens=7))
    exact, found = said
    assert torch.equal(found.sequences, exact.sequences) and (not masked or torch.equal(exact.sequences, whole))
    assert_same(cache_in(found), cache_in(exact))
    assert not masked or cache_in(found).get_seq_length() == 12


@by_text
@pytest.mark.parametrize("asked", [{}, {"num_beams": 3}, {"do_sample": True}, {"return_dict_in_generate": True}],
                         ids=str)  # fmt: skip
def test_a_cache_of_the_users_is_filled(name: str, asked: dict[str, Any]) -> None:
    held = []

    def with_cache() -> dict[str, Any]:
        held.append(EncoderDecoderCache(DynamicCache(), DynamicCache()))
        return asked | {NAME: held[-1]}

    agree(text_pair(name), with_cache, **encoded(BY_NAME[name], padding="left"), max_new_tokens=6)
    exact, found = held
    assert exact.get_seq_length() == 6
    assert_same(found, exact)
