"""Every argument of transformers' `generate` gives the original's result on a replaced model, in float32."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers as t
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers.generation import GenerationMixin

import infuse
from tests.models.families import BY_NAME

Model = Any
LETTERS = [chr(33 + i) for i in range(91)]  # each a token of its own


def tokenizer(reverse: bool = False, size: int = 96) -> t.PreTrainedTokenizerFast:
    names = [
        "<pad>",
        "<s>",
        "</s>",
        "<unk>",
        *(reversed(LETTERS) if reverse else LETTERS),
        *(f"<{i}>" for i in range(size - 95)),
    ]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return t.PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="module")
def pair() -> tuple[Model, Model]:
    """The original and the replaced model."""
    return BY_NAME["llama"].make(), infuse.init_inference(BY_NAME["llama"].make(), dtype="fp32").module


def prompt(rows: int = 2, tokens: int = 7) -> Tensor:
    return torch.randint(3, 96, (rows, tokens), generator=torch.Generator().manual_seed(5))


def generated(model: Model, *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(11)
    ids = {} if args else {"inputs": prompt(2)}
    return model.generate(*args, **{**ids, "max_new_tokens": 12, **kwargs})


def same(ours: Any, theirs: Any, where: str = "") -> None:
    """Equal token ids and names; scores, states and weights as near as float32 is."""
    if isinstance(theirs, Tensor):
        assert ours.shape == theirs.shape, where
        if theirs.is_floating_point():
            torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4, msg=lambda found: f"{where}: {found}")
        else:
            assert torch.equal(ours, theirs), where
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            if name not in ("cache", "past_key_values"):
                same(ours[name], theirs[name], f"{where}.{name}")
    elif isinstance(theirs, (tuple, list)):
        assert len(ours) == len(theirs), where
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            same(one, other, f"{where}[{i}]")
    else:
        assert ours == theirs, where


class Words(t.generation.streamers.BaseStreamer):
    def __init__(self) -> None:
        self.put_so_far: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.put_so_far.append(value.tolist())

    def end(self) -> None:
        self.put_so_far.append("end")


def least_likely(
    model: Model,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    of_all: int = 1,
    **kwargs: Any,
) -> Tensor:
    """A decoding loop of the caller's, with an argument of its own."""
    kwargs = {
        name: value for name, value in kwargs.items() if name in ("attention_mask", "past_key_values", "position_ids")
    }
    for _ in range(of_all):
        scores = model(input_ids, attention_mask=kwargs.get("attention_mask")).logits[:, -1]
        input_ids = torch.cat((input_ids, scores.argmin(-1, keepdim=True)), dim=1)
    return input_ids


SAMPLED = dict(do_sample=True)
OUTPUTS = dict(return_dict_in_generate=True, output_scores=True, output_logits=True, output_hidden_states=True)
SMALL = t.ContinuousBatchingConfig(page_size=4, num_blocks=16, max_batch_tokens=16)
# What a call asks for, by the argument that it is about.
ASKED: dict[str, dict[str, Any]] = {
    "nothing": {}, "max_length": dict(max_new_tokens=None, max_length=15),
    "min_new_tokens": dict(min_new_tokens=9, eos_token_id=58), "min_length": dict(min_length=14, eos_token_id=58),
    "max_time": dict(max_time=1e6), "eos_token_id": dict(eos_token_id=[58, 93], pad_token_id=0),
    "stop_strings": dict(stop_strings=["Z", "kQ"], tokenizer=tokenizer()), "tokenizer": dict(tokenizer=tokenizer()),
    "one stop string": dict(stop_strings="?", tokenizer=tokenizer()),
    "stop_strings, sampled": dict(stop_strings=LETTERS[:9], tokenizer=tokenizer(), pad_token_id=0, **SAMPLED),
    "stop_strings, beams": dict(stop_strings=LETTERS[:9], tokenizer=tokenizer(), num_beams=2),
    "stop_strings, a dict": dict(stop_strings=LETTERS[:9], tokenizer=tokenizer(), **OUTPUTS),
    "token_healing": dict(inputs=prompt(1), token_healing=True, tokenizer=tokenizer()),
    "use_cache": dict(use_cache=False), "num_beams": dict(num_beams=3),
    "early_stopping": dict(num_beams=2, early_stopping=True, eos_token_id=58),
    "length_penalty": dict(num_beams=2, length_penalty=0.3, eos_token_id=58),
    "beam sample": dict(num_beams=2, **SAMPLED), "num_return_sequences": dict(num_return_sequences=3, **SAMPLED),
    "beams returned": dict(num_beams=3, num_return_sequences=2), "temperature": dict(temperature=0.6, **SAMPLED),
    "top_k": dict(top_k=5, **SAMPLED), "top_p": dict(top_p=0.7, **SAMPLED), "min_p": dict(min_p=0.1, **SAMPLED),
    "top_h": dict(top_h=0.4, **SAMPLED), "typical_p": dict(typical_p=0.6, **SAMPLED),
    "epsilon_cutoff": dict(epsilon_cutoff=0.02, **SAMPLED), "eta_cutoff": dict(eta_cutoff=0.02, **SAMPLED),
    "repetition_penalty": dict(repetition_penalty=1.7),
    "encoder_repetition_penalty": dict(encoder_repetition_penalty=1.5),
    "no_repeat_ngram_size": dict(no_repeat_ngram_size=2),
    "encoder_no_repeat_ngram_size": dict(encoder_no_repeat_ngram_size=2),
    "bad_words_ids": dict(bad_words_ids=[[58], [60, 61]]),
    "renormalize_logits": dict(renormalize_logits=True, top_p=0.8, **SAMPLED),
    "forced_bos_token_id": dict(forced_bos_token_id=7), "forced_eos_token_id": dict(forced_eos_token_id=7),
    "remove_invalid_values": dict(remove_invalid_values=True),
    "exponential_decay_length_penalty": dict(exponential_decay_length_penalty=(2, 1.5), eos_token_id=58),
    "suppress_tokens": dict(suppress_tokens=[58, 93]), "begin_suppress_tokens": dict(begin_suppress_tokens=[58]),
    "sequence_bias": dict(sequence_bias=[[[58], -5.0], [[30], 9.0]]), "guidance_scale": dict(guidance_scale=1.5),
    "negative_prompt_ids": dict(
        guidance_scale=1.5, negative_prompt_ids=prompt(2, 4), negative_prompt_attention_mask=torch.ones(2, 4).long()
    ),
    "watermarking_config": dict(
        watermarking_config=t.WatermarkingConfig(bias=2.5, seeding_scheme="selfhash"), **SAMPLED
    ),
    "synthid": dict(watermarking_config=t.SynthIDTextWatermarkingConfig(keys=[654, 400, 836], ngram_len=3), **SAMPLED),
    "prefix_allowed_tokens_fn": dict(prefix_allowed_tokens_fn=lambda row, ids: [20 + row, 30, 40 + len(ids)]),
    "prompt_lookup_num_tokens": dict(
        inputs=prompt(1).repeat(1, 2), prompt_lookup_num_tokens=3, max_matching_ngram_size=2
    ),
    "prefill_chunk_size": dict(prefill_chunk_size=3),
    "outputs": OUTPUTS, "outputs of beams": dict(num_beams=2, **OUTPUTS),
    "scores without a dict": dict(output_scores=True, output_logits=True),
    "outputs of assisted": dict(inputs=prompt(1), prompt_lookup_num_tokens=3, **OUTPUTS),
    "dynamic": dict(cache_implementation="dynamic"), "static": dict(cache_implementation="static"),
    "sliding_window": dict(cache_implementation="sliding_window"), "hybrid": dict(cache_implementation="hybrid"),
    "static, of a length": dict(cache_implementation="static", max_cache_len=64),
    "paged": dict(inputs=prompt(1), cache_implementation="paged", continuous_batching_config=SMALL),
    "disable_compile": dict(cache_implementation="static", disable_compile=True),
    "compile_config": dict(cache_implementation="static", compile_config=t.CompileConfig(backend="eager")),
    "low_memory": dict(low_memory=True), "custom_generate": dict(custom_generate=least_likely, of_all=3),
    "logits_to_keep": dict(logits_to_keep=2), "assistant_early_exit": dict(inputs=prompt(1), assistant_early_exit=2),
    "a static cache": dict(past_key_values=t.StaticCache), "a dynamic cache": dict(past_key_values=t.DynamicCache),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_arguments(pair: tuple[Model, Model], name: str) -> None:
    results = []
    for model in pair:
        asked = dict(ASKED[name])
        if kind := asked.get("past_key_values"):
            asked["past_key_values"] = kind(
                config=model.config, **({"max_cache_len": 32} if kind is t.StaticCache else {})
            )
        try:
            results.append(generated(model, **asked))
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
    assert not isinstance(results[0], str), f"the original does not take this: {results[0]}"
    same(results[1], results[0])


def test_streamer(pair: tuple[Model, Model]) -> None:
    heard = []
    for model in pair:
        words = Words()
        generated(model, prompt(1), streamer=words)
        generated(model, prompt(1), streamer=words, stop_strings="Z", tokenizer=tokenizer())
        heard.append(words.put_so_far)
    assert heard[0] == heard[1] and heard[0].count("end") == 2


def assistant(vocabulary: int = 96) -> Model:
    return BY_NAME["qwen2"].make(vocab_size=vocabulary)


@pytest.mark.parametrize("replaced", [False, True], ids=["original assistant", "replaced assistant"])
@pytest.mark.parametrize("sampled", [False, True])
def test_assistant_model(pair: tuple[Model, Model], replaced: bool, sampled: bool) -> None:
    found = []
    for model in pair:
        helper = infuse.init_inference(assistant(), dtype="fp32").module if replaced else assistant()
        more: dict[str, Any] = dict(num_assistant_tokens=3, assistant_confidence_threshold=0.2, do_sample=sampled)
        if not sampled:
            more |= OUTPUTS
        found.append(generated(model, prompt(1), assistant_model=helper, **more))
    same(found[1], found[0])


def test_assistant_with_its_own_tokenizer(pair: tuple[Model, Model]) -> None:
    theirs = dict(tokenizer=tokenizer(), assistant_tokenizer=tokenizer(reverse=True, size=100))
    found = [generated(model, prompt(1), assistant_model=assistant(100), **theirs) for model in pair]
    same(found[1], found[0])


def test_arguments_by_position(pair: tuple[Model, Model]) -> None:
    """All of `generate`'s arguments may come without their names."""
    settings = t.GenerationConfig(max_new_tokens=9, num_assistant_tokens=3, pad_token_id=0)
    names = list(inspect.signature(GenerationMixin.generate).parameters)[1:-1]
    values = dict(inputs=prompt(1), generation_config=settings, assistant_model=assistant())
    for last in ("generation_config", "assistant_model", "custom_generate"):
        given = [values.get(name) for name in names[: names.index(last) + 1]]
        torch.manual_seed(0)
        wanted = pair[0].generate(*given)
        torch.manual_seed(0)
        assert torch.equal(pair[1].generate(*given), wanted), last


def test_stop_strings_need_a_tokenizer(pair: tuple[Model, Model]) -> None:
    for model in pair:
        with pytest.raises(ValueError, match="tokenizer"):
            generated(model, stop_strings="Z")


def test_stop_strings_in_the_configuration(pair: tuple[Model, Model]) -> None:
    settings = t.GenerationConfig(max_new_tokens=30, stop_strings=LETTERS[:12], pad_token_id=0)
    found = [model.generate(prompt(), settings, tokenizer=tokenizer()) for model in pair]
    assert torch.equal(*found) and found[0].shape[1] < 37


def test_synced_gpus(pair: tuple[Model, Model]) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        found = [generated(model, synced_gpus=True) for model in pair]
    finally:
        torch.distributed.destroy_process_group()
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_output_attentions(name: str) -> None:
    """They need eager attention, on both sides. Where there are windows, weights of keys in the window are returned."""
    original, replaced = BY_NAME[name].make(), infuse.init_inference(BY_NAME[name].make(), dtype="fp32").module
    found = []
    for model in (original, replaced):
        model.set_attn_implementation("eager")
        found.append(generated(model, output_attentions=True, **OUTPUTS))
    assert found[0].attentions
    same(found[1], found[0])
