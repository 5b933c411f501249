"""A key that is missing: the error names it, the file and what to do, unless llama.cpp has a default for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from infuse.ground.errors import CheckpointError
from infuse.weights.gguf.config import config_notes, config_values
from infuse.weights.gguf.parts import open_parts
from infuse.weights.gguf.vocabulary import check_vocabulary
from tests.support.gguf_files import write
from tests.weights.gguf.cases import CASES
from tests.weights.gguf.cases.written import keys_of, model_of, tensors_of

# Keys that llama.cpp reads with a default (load_hparams), for all architectures or for those that are named. Without
# one of them the config is another one, as it is there.
OPTIONAL = {
    "attention.head_count_kv", "attention.key_length", "rope.freq_base", "rope.dimension_count", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned", "expert_group_count",
    "expert_group_used_count", "expert_weights_norm", "expert_weights_scale", "final_logit_softcapping",
    "attention.shared_kv_layers", "nextn_predict_layers", "attention.key_length_mla", "attention.value_length_mla",
    "rope.scaling.yarn_log_multiplier",
}  # fmt: skip
OPTIONAL_OF = {
    "granite": {"embedding_scale", "residual_scale", "attention.scale"},
    "granitehybrid": {"embedding_scale", "residual_scale", "attention.scale", "logit_scale"},
    "gemma2": {"attention.sliding_window", "attn_logit_softcapping"},
    "exaone4": {"attention.sliding_window", "attention.sliding_window_pattern"},
    "glm4moe": {"leading_dense_block_count"},
    "deepseek2": {"leading_dense_block_count", "expert_gating_func"},
}
WITHOUT_EFFECT = {name: {"feed_forward_length"} for name in ("qwen2moe", "qwen3moe", "qwen35moe", "qwen3next")}
NORM = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")


@pytest.mark.parametrize("name", CASES)
def test_each_key_of_a_family(tmp_path: Path, name: str) -> None:
    case, path = CASES[name], tmp_path / "model.gguf"
    model = model_of(case)
    write(path, case.architecture, keys_of(case, model.config), tensors_of(case, model))
    files = open_parts([path])
    whole, keys = config_values(files), files[0].values
    named = []
    for key in [key for key in keys if key.startswith(f"{case.architecture}.")]:
        value, short = keys.pop(key), key.removeprefix(f"{case.architecture}.")
        try:
            differs = config_values(files) != whole
        except CheckpointError as error:
            assert f"{path}: has no {key}" in str(error) and "put the original model's config.json beside" in str(error)
            named.append(short)
        else:
            known = [table.get(case.architecture, set()) for table in (OPTIONAL_OF, WITHOUT_EFFECT)]
            assert not differs or short in OPTIONAL.union(*known), key
        keys[key] = value
    assert {"block_count", "context_length", "embedding_length", "attention.head_count"} < set(named)
    assert any(epsilon in named for epsilon in NORM)


def test_all_missing_keys_are_in_one_error(tmp_path: Path) -> None:
    case, path = CASES["lfm2moe"], tmp_path / "model.gguf"
    model = model_of(case)
    keys = keys_of(case, model.config)
    absent = ("attention.layer_norm_rms_epsilon", "shortconv.l_cache", "expert_used_count")
    left = {key: value for key, value in keys.items() if key.removeprefix("lfm2moe.") not in absent}
    write(path, "lfm2moe", left, tensors_of(case, model))
    told = ", ".join(f"lfm2moe.{key}" for key in absent)
    with pytest.raises(CheckpointError, match=f"model.gguf: has no {told}, which its config needs; convert the model"):
        config_values(open_parts([path]))
    (note,) = config_notes(open_parts([path]))
    assert "config is not compared" in note and told in note


def test_the_width_of_an_mlp_is_asked_for_by_its_name(tmp_path: Path) -> None:
    case, path = CASES["llama"], tmp_path / "model.gguf"
    model = model_of(case)
    keys = {key: value for key, value in keys_of(case, model.config).items() if "feed_forward" not in key}
    write(path, "llama", keys, tensors_of(case, model))
    with pytest.raises(CheckpointError, match=r"has no llama.feed_forward_length, which its config needs"):
        config_values(open_parts([path]))


def test_without_a_scale_scores_of_granite_have_that_of_a_head(tmp_path: Path) -> None:
    """transformers' own default would be 1."""
    case, path = CASES["granite"], tmp_path / "model.gguf"
    model = model_of(case)
    keys = keys_of(case, model.config)
    for given in ({}, {"granite.attention.scale": 0.0, "granite.embedding_scale": 0.0}):
        left = {key: value for key, value in keys.items() if key != "granite.attention.scale"} | given
        write(path, "granite", left, tensors_of(case, model))
        values = config_values(open_parts([path]))
        assert values["attention_multiplier"] == 16**-0.5
        assert values["embedding_multiplier"] == (1.0 if given else 3.0)


TOKENS = {"tokenizer.ggml.tokens": ["<s>", "a", "b", "ab"], "tokenizer.ggml.scores": [0.0, -1.0, -2.0, -3.0]}
GPT2 = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", **TOKENS}
SENTENCES = {**GPT2, "tokenizer.ggml.model": "llama"}


@pytest.mark.parametrize(("values", "told"), [
    ({}, "has no tokenizer.ggml.model, tokenizer.ggml.tokens"),
    (GPT2, "has no tokenizer.ggml.merges"),
    ({**SENTENCES, "tokenizer.ggml.scores": None}, "has no tokenizer.ggml.scores or tokenizer.ggml.merges"),
    ({**SENTENCES, "tokenizer.ggml.model": "t5", "tokenizer.ggml.scores": None}, "has no tokenizer.ggml.scores"),
    ({**SENTENCES, "tokenizer.ggml.model": "rwkv"}, "model is 'rwkv' (possible: gpt2, llama, gemma4, t5)"),
    ({**SENTENCES, "tokenizer.ggml.eos_token_id": 4}, "eos_token_id is 4 (possible: 0 to 3)"),
    ({**SENTENCES, "tokenizer.ggml.scores": [0.0]}, "scores is [0.0] (possible: a list of 4, as tokens)"),
    ({**SENTENCES, "tokenizer.ggml.token_type": 1}, "token_type is 1 (possible: a list of 4, as tokens)"),
    ({**SENTENCES, "tokenizer.ggml.tokens": [1, 2]}, "tokens is [1, 2] (possible: a list of texts)"),
])  # fmt: skip
def test_what_a_tokenizer_needs(values: dict[str, object], told: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        check_vocabulary({key: value for key, value in values.items() if value is not None}, "a.gguf")
    assert str(raised.value).startswith("a.gguf: ") and told in str(raised.value)
    assert "put the original model's tokenizer.json and tokenizer_config.json beside the file" in str(raised.value)


@pytest.mark.parametrize("values", [
    {**GPT2, "tokenizer.ggml.merges": ["a b"]}, SENTENCES,
    {**SENTENCES, "general.architecture": "gemma3", "tokenizer.ggml.scores": None},
    {**SENTENCES, "tokenizer.ggml.model": "gemma4", "tokenizer.ggml.eos_token_id": 3},
])  # fmt: skip
def test_what_a_tokenizer_does_not_need(values: dict[str, object]) -> None:
    check_vocabulary({key: value for key, value in values.items() if value is not None}, "a.gguf")
