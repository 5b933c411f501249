"""Tiny models in GGUF files: loaded into models on meta, with the logits of transformers on the files' own values."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import infuse
from infuse.ground.errors import CheckpointError
from infuse.plan.kinds import BLOCK
from infuse.quant.parse import quant_format
from infuse.weights.gguf.blocks import FORMATS
from tests.support.gguf_files import llama_tensors, llama_values, matrices_in, permuted, write

IDS = torch.arange(1, 12).unsqueeze(0)


def tiny_llama(**changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    values = dict(
        vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**values, **changes})).eval()


def loaded(model, path):
    """An engine of a model of the same config on meta, with the values of the file."""
    with torch.device("meta"):
        empty = type(model)(model.config)
    return infuse.init_inference(
        empty.eval(), checkpoint=str(path), dtype=torch.float32, replace_with_kernel_inject=True
    )


def assert_kept(engine, formats):
    """Both layers are blocks with the codes of the file: refused ones would have their values, and the same logits."""
    blocks = [step for step in engine.plan.steps if step.depth == BLOCK]
    assert len(blocks) == 2 and " become" not in str(engine.plan), str(engine.plan)
    assert {format for step in blocks for format in step.formats.values()} == {*formats}


def expected(model, stored):
    """Logits of the model with the values `stored` by its own names."""
    model.load_state_dict(stored)
    with torch.no_grad():
        return model(IDS).logits


def unpermuted_llama(model, stored):
    """A Llama's state dict from tensors by GGUF's names: the inverse of llama_tensors, by comparing names."""
    by_name = {}
    for name, gguf_name in zip(model.state_dict(), llama_tensors(model), strict=True):
        value = stored[gguf_name]
        heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
        if (count := heads.get(name.split(".")[-2])) is not None:
            rows = torch.arange(len(value))
            value = value[torch.argsort(permuted(rows, count))]
        by_name[name] = value
    return by_name


@pytest.mark.parametrize("type", ("F32", "F16", "BF16", *FORMATS))
def test_llama_in_every_type(tmp_path, type):
    path, model = tmp_path / "model.gguf", tiny_llama()
    stored = write(path, "llama", llama_values(model.config), llama_tensors(model), matrices_in(type))
    wanted = expected(model, unpermuted_llama(model, stored))
    engine = loaded(model, path)
    torch.testing.assert_close(engine(IDS).logits, wanted, rtol=1e-4, atol=1e-4)
    assert_kept(engine, [str(quant_format(FORMATS[type]))] if type in FORMATS else [])


def test_llama_as_transformers_loads_it(tmp_path):
    path, model = tmp_path / "model.gguf", tiny_llama()
    write(path, "llama", llama_values(model.config), llama_tensors(model), matrices_in("Q8_0"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    with torch.no_grad():
        wanted = theirs(IDS).logits
    assert theirs.config.num_key_value_heads == model.config.num_key_value_heads
    torch.testing.assert_close(loaded(model, path)(IDS).logits, wanted, rtol=1e-4, atol=1e-4)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path, gguf_file="model.gguf"))
    engine = infuse.init_inference(
        empty.eval(), checkpoint=str(path), dtype=torch.float32, replace_with_kernel_inject=True
    )
    torch.testing.assert_close(engine(IDS).logits, wanted, rtol=1e-4, atol=1e-4)


def test_a_tied_head_and_mixed_types(tmp_path):
    """As Q4_K_M mixes: v and down in Q6_K, the table, which is the head too, in Q6_K."""
    path, model = tmp_path / "model.gguf", tiny_llama(tie_word_embeddings=True)
    better = ("token_embd", "attn_v", "ffn_down")

    def type_of(name, tensor):
        if tensor.dim() < 2:
            return "F32"
        return "Q6_K" if any(one in name for one in better) and ("blk.1" not in name) else "Q4_K"

    stored = write(path, "llama", llama_values(model.config), llama_tensors(model), type_of)
    names = [name for name in model.state_dict() if name != "lm_head.weight"]
    by_name = dict(zip(names, stored.values(), strict=True))
    for name, value in by_name.items():
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        if heads:
            by_name[name] = value[torch.argsort(permuted(torch.arange(len(value)), heads))]
    wanted = expected(model, by_name | {"lm_head.weight": by_name["model.embed_tokens.weight"]})
    engine = loaded(model, path)
    torch.testing.assert_close(engine(IDS).logits, wanted, rtol=1e-4, atol=1e-4)
    assert_kept(engine, ["q4_k", "q6_k"])


def test_split_files(tmp_path):
    """All parts are found from any of them, from the folder, and in a list; a missing one is named."""
    model = tiny_llama()
    whole = tmp_path / "whole.gguf"
    values, tensors = llama_values(model.config), llama_tensors(model)
    write(whole, "llama", values, tensors, matrices_in("Q8_0"))
    wanted = loaded(model, whole)(IDS).logits
    folder = tmp_path / "parts"
    folder.mkdir()
    write(folder / "model.gguf", "llama", values, tensors, matrices_in("Q8_0"), most_tensors=8)
    parts = sorted(folder.iterdir())
    assert [part.name for part in parts] == [f"model-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    for source in (parts[0], parts[2], folder):
        torch.testing.assert_close(loaded(model, source)(IDS).logits, wanted)
    with torch.device("meta"):
        empty = type(model)(model.config)
    engine = infuse.init_inference(empty, checkpoint=[str(part) for part in reversed(parts)], dtype=torch.float32)
    torch.testing.assert_close(engine(IDS).logits, wanted, rtol=1e-4, atol=1e-4)
    for source, match in (
        ([str(part) for part in parts[:2]], "is split in 3 files, and there are"),
        ([str(part) for part in (*parts, parts[1])], "is split in 3 files"),
        ([str(parts[0]), str(whole)], "is split in 3 files"),
    ):
        with torch.device("meta"):
            empty = type(model)(model.config)
        with pytest.raises(CheckpointError, match=match):
            infuse.init_inference(empty, checkpoint=source, dtype=torch.float32)
    parts[1].unlink()
    with torch.device("meta"):
        empty = type(model)(model.config)
    with pytest.raises(CheckpointError, match="1 files are missing.*model-00002-of-00003.gguf"):
        infuse.init_inference(empty, checkpoint=str(folder), dtype=torch.float32)


def test_a_folder_of_several_models(tmp_path):
    model = tiny_llama()
    for type in ("Q8_0", "Q4_0"):
        write(tmp_path / f"model-{type}.gguf", "llama", llama_values(model.config), llama_tensors(model))
    (tmp_path / "mmproj-model.gguf").write_bytes(b"another")
    with torch.device("meta"):
        empty = type_of_model = LlamaForCausalLM(model.config)
    with pytest.raises(CheckpointError, match="holds 2 models: model-Q4_0.gguf, model-Q8_0.gguf; give the path"):
        infuse.init_inference(empty, checkpoint=str(tmp_path), dtype=torch.float32)
    assert type_of_model is empty
