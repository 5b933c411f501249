"""`infuse shard`: a folder that `infuse generate` and transformers' tokenizer take as they take the one that it was
made from.
"""

from __future__ import annotations

import os

import pytest
from transformers import BertConfig, BertModel

from infuse.weights import fill
from tests.support.commands import PROMPT, run


@pytest.mark.slow
def test_a_sharded_folder_generates_what_the_original_does(folder, tmp_path, monkeypatch):  # noqa: F811
    out, err = run("shard", folder, tmp_path / "out", "--dtype", "float32", "--quant", "int8:32", "--device", "cpu")
    assert "int8:32" in out and "block" in out and f"MB in {tmp_path / 'out'}" in err.replace("\n", "")
    copied = set(os.listdir(folder)) - {"model.safetensors"}
    assert set(os.listdir(tmp_path / "out")) == copied | {"infuse.json", "rank-00-of-01.safetensors"}
    generate = ("--prompt", PROMPT, "--max-new-tokens", 12, "--device", "cpu")
    wanted, _ = run("generate", folder, *generate, "--dtype", "float32", "--quant", "int8:32")
    monkeypatch.setattr(fill, "quantized", None)  # nothing is quantized any more
    assert run("generate", tmp_path / "out", *generate)[0] == wanted
    assert (
        "decode, tokens/s" in run("bench", tmp_path / "out", "--prompt-tokens", 4, "--new-tokens", 2, "--repeats", 1)[0]
    )


def test_shard_says_what_is_wrong(folder, tmp_path):  # noqa: F811
    assert "OUT is MODEL_DIR" in run("shard", folder, folder, code=2)[1]
    assert "does not exist" in run("shard", tmp_path / "nowhere", tmp_path / "out", code=2)[1]
    assert "quant" in run("shard", folder, tmp_path / "out", "--quant", "int5", code=2)[1]
    (tmp_path / "file").write_text("")
    assert "cannot be written" in run("shard", folder, tmp_path / "file" / "out", code=1)[1]


def test_a_model_that_does_not_generate_is_sharded_and_not_timed(tmp_path):
    config = BertConfig(vocab_size=30, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    BertModel(config).save_pretrained(tmp_path / "bert")
    run("shard", tmp_path / "bert", tmp_path / "out", "--dtype", "float32")
    assert (tmp_path / "out" / "infuse.json").is_file()
    assert "does not generate text" in run("bench", tmp_path / "out", code=2)[1]
