"""Commands on a GGUF file: config, tokenizer and chat template come out of the file."""

from __future__ import annotations

import shutil

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from infuse_cli.gguf_file import read_gguf_tokenizer
from infuse_cli.model_folder import read_config
from tests.support.commands import PROMPT, run
from tests.support.gguf_files import llama_tensors, llama_values, matrices_in, vocabulary_of, write

GENERATE = ("--prompt", PROMPT, "--max-new-tokens", 8, "--device", "cpu", "--dtype", "float32")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=0, pad_token_id=0,
        tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def file(folder, model, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny-Q8_0.gguf"
    vocabulary = vocabulary_of(folder)
    model.resize_token_embeddings(len(vocabulary["tokenizer.ggml.tokens"]))
    values = llama_values(model.config)
    stored = write(path, "llama", values, llama_tensors(model), matrices_in("Q8_0"), vocabulary)
    assert stored
    return path


def test_the_tokenizer_is_the_original(folder, file):
    ours, original = read_gguf_tokenizer((file,)), AutoTokenizer.from_pretrained(folder)
    for text in (PROMPT, "for i in range(3):\n    x<eos>", "ä €", ""):
        assert ours(text)["input_ids"] == original(text)["input_ids"]
    assert ours.eos_token == "<eos>" and ours.pad_token == "<eos>"
    message = [{"role": "user", "content": "hello"}]
    assert ours.apply_chat_template(message, tokenize=False) == "hello"


def test_the_config(file, model):
    config = read_config(file, weights=True)
    assert config.architectures == ["LlamaForCausalLM"] and config.tie_word_embeddings
    for name in ("vocab_size", "hidden_size", "num_key_value_heads", "head_dim", "eos_token_id", "rope_parameters"):
        assert getattr(config, name) == getattr(model.config, name)


def test_plan_generate_bench(file, folder):
    out, _ = run("plan", file, "--dtype", "float32", "--device", "cpu")
    assert "block" in out and ("int8:32:f16" in out or "int8 in groups of 32" in out)
    text, err = run("generate", file, *GENERATE)
    assert "tokens/s" in err
    assert run("generate", file.parent, *GENERATE)[0] == text
    table, _ = run("bench", file, "--prompt-tokens", 4, "--new-tokens", 2, "--repeats", 1, "--against", "eager")
    assert "transformers eager" in table


def test_generate_is_what_the_values_give(file, tmp_path, model):
    """The same text as from a folder with the file's values as safetensors."""
    from infuse.weights.gguf.names import named_tensors
    from infuse.weights.gguf.parts import open_parts

    tensors = {name: tensor.read() for name, tensor in named_tensors(open_parts([file])).items()}
    model.load_state_dict(tensors, strict=False)
    model.save_pretrained(tmp_path)
    read_gguf_tokenizer((file,)).save_pretrained(tmp_path)
    assert run("generate", tmp_path, *GENERATE)[0] == run("generate", file, *GENERATE)[0]


def test_a_folder_with_a_config_and_a_file(file, folder, tmp_path):
    """Published folders have a config.json and a tokenizer at times; they are preferred."""
    shutil.copy(file, tmp_path)
    read_config(file).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    assert run("generate", tmp_path, *GENERATE)[0] == run("generate", file, *GENERATE)[0]


def test_shard(file, tmp_path):
    run("shard", file, tmp_path / "out", "--dtype", "float32", "--device", "cpu")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "tokenizer.json", "infuse.json"} <= names and not any("gguf" in name for name in names)
    assert run("generate", tmp_path / "out", *GENERATE)[0] == run("generate", file, *GENERATE)[0]


@pytest.mark.parametrize(("key", "told"), [
    ("llama.attention.layer_norm_rms_epsilon", "or put the original model's config.json beside the file"),
    ("llama.feed_forward_length", "or put the original model's config.json beside the file"),
    ("tokenizer.ggml.merges", "put the original model's tokenizer.json and tokenizer_config.json beside the file"),
    ("tokenizer.ggml.tokens", "put the original model's tokenizer.json and tokenizer_config.json beside the file"),
])  # fmt: skip
def test_missing_keys_are_named_with_a_remedy(folder, model, tmp_path, key, told):
    path = tmp_path / "part.gguf"
    vocabulary = {name: value for name, value in vocabulary_of(folder).items() if name != key}
    values = {name: value for name, value in llama_values(model.config).items() if name != key}
    write(path, "llama", values, llama_tensors(model), matrices_in("Q8_0"), vocabulary)
    _, err = run("generate", path, *GENERATE, code=2)
    err = " ".join(err.split())
    assert f"part.gguf: has no {key}" in err and told in err and "give the folder" in err
    if key.startswith("llama."):
        model.config.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    if key != "tokenizer.ggml.tokens":
        assert "tokens/s" in run("generate", tmp_path, *GENERATE)[1]


def test_what_is_wrong_is_one_line(file, tmp_path):
    (tmp_path / "broken.gguf").write_bytes(file.read_bytes()[:1000])
    for command in (("plan",), ("generate", "--prompt", "x"), ("bench",)):
        name, *options = command
        _, err = run(name, tmp_path / "broken.gguf", *options, code=2)
        assert "broken.gguf: truncated, corrupt" in err
    (tmp_path / "a-00001-of-00002.gguf").write_bytes(b"")
    assert "a-00002-of-00002.gguf" in run("plan", tmp_path / "a-00001-of-00002.gguf", code=2)[1].replace("\n", "")
    assert "holds 2 models" in run("plan", tmp_path, code=2)[1]
    (tmp_path / "text.txt").write_text("")
    assert "or a .gguf file" in run("plan", tmp_path / "text.txt", code=2)[1]
