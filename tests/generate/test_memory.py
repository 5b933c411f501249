"""Host memory does not grow with the number of answers, whatever the model and the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn
from transformers.generation.streamers import BaseStreamer

import infuse
from infuse.native import kernels
from infuse.ops.cpu.program import NativeProgram
from tests.models import encoder_decoders, whisper
from tests.models.families import BY_NAME, inputs
from tests.support.growth import counts_bytes, left_by
from tests.support.states import ONE_OF_EACH

pytestmark = [
    pytest.mark.skipif(isinstance(kernels(), str), reason=str(kernels())),
    pytest.mark.skipif(not counts_bytes(), reason="the C library does not count bytes"),
]
Answer = Callable[[], Any]
ANSWERS = 40  # in a window
# A string that an operator leaks takes at least 48 bytes, and a program's text a thousand for each layer.
MOST_BYTES, MOST_OBJECTS = 16, 0.2


class Ignored(BaseStreamer):
    def put(self, value: Tensor) -> None: ...
    def end(self) -> None: ...


def replaced(model: nn.Module, **config: Any) -> infuse.InferenceEngine:
    return infuse.init_inference(model, **{"dtype": "fp32", "progress": False, "verify": "off", **config})


def decoder(name: str, batch: int = 1, config: dict[str, Any] | None = None, **asked: Any) -> Answer:
    """Answers of a model with an untied head to prompts in which tokens come again."""
    engine = replaced(BY_NAME[name].make(tie_word_embeddings=False), **(config or {}))
    given = inputs(BY_NAME[name], batch=batch, tokens=9, padding="left" if batch > 1 else None, seed=12)
    given["input_ids"][:, 6:] = given["input_ids"][:, 3:6]
    return lambda: engine.generate(**given, **{"max_new_tokens": 4, "do_sample": False, **asked})


def pair(name: str, **asked: Any) -> Answer:
    family = encoder_decoders.BY_NAME[name]
    engine, given = replaced(encoder_decoders.made(family)), encoder_decoders.encoded(family, batch=1)
    return lambda: engine.generate(**given, max_new_tokens=4, **asked)


def heard() -> Answer:
    engine, given = replaced(whisper.whisper()), whisper.sounds(whisper.FRAMES)
    return lambda: engine.generate(**given, max_new_tokens=5, language="en")


def drafted() -> Answer:
    draft = replaced(BY_NAME["llama"].make(1, tie_word_embeddings=False)).module
    return decoder("llama", assistant_model=draft, max_new_tokens=6)


def forward(name: str) -> Answer:
    engine, given = replaced(BY_NAME[name].make()), inputs(BY_NAME[name])
    return lambda: engine(**given)


LOOKUP: dict[str, Any] = dict(prompt_lookup_num_tokens=4, max_matching_ngram_size=2, max_new_tokens=6)
# Those whose steps are made in one call, which holds a program anew for each answer's cache.
IN_ONE_CALL: dict[str, Callable[[], Answer]] = {
    "greedy": lambda: decoder("llama"),
    "sampled": lambda: decoder("llama", do_sample=True),
    "streamed": lambda: decoder("llama", streamer=Ignored()),
    "padded batch": lambda: decoder("mistral", batch=3),
    "bfloat16": lambda: decoder("llama", config=dict(dtype="bf16")),
    "int8 weights": lambda: decoder("llama", config=dict(quant="int8")),
    "int4 weights": lambda: decoder("qwen3", config=dict(quant="int4")),
    "int8 cache": lambda: decoder("llama", config=dict(kv_cache="int8")),
    "mixture": lambda: decoder("mixtral"),
    "latent": lambda: decoder("deepseek-v3"),
    "mamba": lambda: decoder("mamba"),
    "pair": lambda: pair("t5"),
    "beams of a pair": lambda: pair("t5", num_beams=2),
    "speech": heard,
    **{name: lambda name=name: decoder(name) for name in ONE_OF_EACH},  # type: ignore[misc]
}
BY_CALLS: dict[str, Callable[[], Answer]] = {
    "scores": lambda: decoder("llama", output_scores=True, return_dict_in_generate=True),
    "one token": lambda: decoder("llama", max_new_tokens=1),
    "beams": lambda: decoder("llama", num_beams=2),
    "lookup": lambda: decoder("llama", **LOOKUP),
    "lookup of a hybrid": lambda: decoder("qwen3_5", **LOOKUP),
    "assistant": drafted,
    "text encoder": lambda: forward("bert"),
    "picture encoder": lambda: forward("vit"),
}


def assert_nothing_is_left(answer: Answer, answers: int = ANSWERS) -> None:
    left = left_by(answer, answers)
    assert left.bytes <= MOST_BYTES and left.objects <= MOST_OBJECTS, left


@pytest.mark.parametrize("kind", IN_ONE_CALL)
def test_an_answer_in_one_call_leaves_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, own, held = IN_ONE_CALL[kind](), NativeProgram.__init__, []
    with monkeypatch.context() as patched:
        patched.setattr(NativeProgram, "__init__", lambda self, *given: (held.append(1), own(self, *given))[1])
        for _ in range(3):
            held.clear()
            answer()
    assert held, "no program was held for the third answer"
    assert_nothing_is_left(answer)


@pytest.mark.parametrize("kind", BY_CALLS)
def test_an_answer_by_other_calls_leaves_nothing(kind: str) -> None:
    assert_nothing_is_left(BY_CALLS[kind]())


@pytest.mark.slow
def test_two_thousand_answers_leave_nothing() -> None:
    """What a window of few answers may not show: something that grows now and then."""
    answer = decoder("llama")
    answer()
    left = left_by(answer, 1000, windows=2)
    assert left.bytes <= 4 and left.objects <= 0.02, left
