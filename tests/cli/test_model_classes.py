"""Folders whose config.json names no architectures: every command takes the class that the folder's files show."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file

from infuse_cli.model_folder import empty_model, read_config
from tests.support.commands import PROMPT, run

SETTINGS = ("--dtype", "float32", "--device", "cpu")
GENERATE = ("--prompt", PROMPT, "--max-new-tokens", 8, *SETTINGS)
SMALL = dict(
    vocab_size=120, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
)  # fmt: skip
BART = dict(
    vocab_size=120, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
)  # fmt: skip


def without_architectures(folder):
    """The folder, whose config does not name a class any more."""
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content.pop("architectures", None)
    path.write_text(json.dumps(content))
    return folder


@pytest.fixture
def nameless(folder, tmp_path):
    return without_architectures(shutil.copytree(folder, tmp_path / "nameless"))


def test_every_command_takes_the_class_with_a_head(folder, nameless, tmp_path):
    wanted, _ = run("generate", folder, *GENERATE)
    text, told = run("generate", nameless, *GENERATE)
    assert text == wanted and "names no architectures; the model is taken as LlamaForCausalLM" in " ".join(told.split())
    assert "plan for LlamaForCausalLM" in run("plan", nameless, *SETTINGS)[0]
    assert "LlamaForCausalLM" in run("bench", nameless, "--prompt-tokens", 4, "--new-tokens", 2, "--repeats", 1)[0]
    out, told = run("shard", nameless, tmp_path / "out", *SETTINGS)
    assert "no place for" not in out and "lm_head" in out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    text, told = run("generate", tmp_path / "out", *GENERATE)
    assert text == wanted and "architectures" not in told
    (nameless / "model.safetensors").unlink()
    assert "plan for LlamaForCausalLM" in run("plan", nameless, *SETTINGS)[0]


MADE = {
    "a tied head": (t.GPT2LMHeadModel, t.GPT2Config(vocab_size=99, n_embd=32, n_layer=1, n_head=2)),
    "a decoder of its own": (t.OPTForCausalLM, t.OPTConfig(**{k: v for k, v in SMALL.items() if "inter" not in k})),
    "no head": (t.LlamaModel, t.LlamaConfig(**SMALL)),
    "a tied pair": (t.BartForConditionalGeneration, t.BartConfig(**BART)),
    "a pair for sounds": (t.WhisperForConditionalGeneration, t.WhisperConfig(
        **BART, num_mel_bins=8, max_source_positions=8, max_target_positions=8, pad_token_id=0, bos_token_id=1,
        eos_token_id=1, decoder_start_token_id=1, begin_suppress_tokens=None,
    )),
    "an encoder": (t.BertModel, t.BertConfig(**SMALL)),
    "an encoder that fills gaps": (t.BertForMaskedLM, t.BertConfig(**SMALL)),
    "an encoder that sorts": (t.BertForSequenceClassification, t.BertConfig(**SMALL, num_labels=3)),
    "a decoder of encoder layers": (t.BertLMHeadModel, t.BertConfig(**SMALL, is_decoder=True)),
    "pictures": (t.ViTForImageClassification, t.ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4,
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_the_class_that_the_files_show(tmp_path, name):
    kind, config = MADE[name]
    kind(config).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [kind.__name__]
    without_architectures(tmp_path)
    read = read_config(tmp_path)
    assert read.architectures == [kind.__name__] and type(empty_model(tmp_path, read)) is kind


WITHOUT_FILES = {
    "no head": "LlamaForCausalLM", "a tied pair": "BartForConditionalGeneration", "an encoder": "BertForMaskedLM",
    "a pair for sounds": "WhisperForConditionalGeneration", "a decoder of encoder layers": "BertLMHeadModel",
    "pictures": "ViTModel",
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_FILES)
def test_the_class_without_files(tmp_path, name):
    MADE[name][1].save_pretrained(tmp_path)
    assert read_config(without_architectures(tmp_path)).architectures == [WITHOUT_FILES[name]]


def test_codes_of_a_head_are_a_head(nameless):
    tensors = load_file(nameless / "model.safetensors")
    tensors["lm_head.qweight"] = torch.zeros(4, 4, dtype=torch.int32)
    del tensors["lm_head.weight"]
    save_file(tensors, nameless / "model.safetensors")
    assert read_config(nameless).architectures == ["LlamaForCausalLM"]


def test_files_that_cannot_be_read_are_told_by_their_reader(nameless):
    (nameless / "model.safetensors").write_bytes(b"broken")
    assert "cannot be loaded" in run("bench", nameless, code=1)[1]
