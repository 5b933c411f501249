"""Folders that hold something else than a model of transformers: each says what it is and what to give."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaForCausalLM

from tests.support.commands import run

COMMANDS = (("plan",), ("generate", "--prompt", "x"), ("bench",), ("shard",))


def refused(folder, command=("plan",)):
    """What a command says of a folder, in one line."""
    name, *options = command
    more = (folder.parent / "out",) if name == "shard" else ()
    out, err = run(name, folder, *more, *options, code=2)
    assert not out
    return " ".join(err.split())


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("with_config", [False, True])
def test_an_adapter(folder, tmp_path, command, with_config):
    model = LlamaForCausalLM.from_pretrained(folder)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    if with_config:
        shutil.copy(folder / "config.json", tmp_path / "adapter")
    told = refused(tmp_path / "adapter", command)
    assert f"adapter is a PEFT adapter (LORA) of {folder}, not a model: " in told
    merge = f"PeftModel.from_pretrained(base, '{tmp_path / 'adapter'}').merge_and_unload().save_pretrained(FOLDER)"
    assert merge in told and "docs/adapters.md" in told


def test_what_an_adapter_says_to_do_works(folder, tmp_path):
    from peft import PeftModel

    base = LlamaForCausalLM.from_pretrained(folder)
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    base = LlamaForCausalLM.from_pretrained(folder)
    PeftModel.from_pretrained(base, str(tmp_path / "adapter")).merge_and_unload().save_pretrained(tmp_path / "merged")
    assert "plan for LlamaForCausalLM" in run("plan", tmp_path / "merged", "--device", "cpu")[0]


def test_an_adapter_beside_its_model_is_a_model(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "both")
    (tmp_path / "both" / "adapter_config.json").write_text("{}")
    assert "block" in run("plan", tmp_path / "both")[0]


def test_a_broken_adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{")
    assert "is a PEFT adapter and does not say of which model, not a model" in refused(tmp_path)


def put(folder, name, content):
    """Write an object in JSON."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content))


def sentence_transformers(path, model):
    put(path, "modules.json", [{"idx": 0, "path": "0_Transformer", "type": "sentence_transformers.models.Transformer"}])
    shutil.copytree(model, path / "0_Transformer")


def diffusers(path, model):
    put(path, "model_index.json", {"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "UNet"]})
    put(path, "unet/config.json", {"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.42.1"})
    shutil.copytree(model, path / "text_encoder")


def a_part_of_diffusers(path, model):
    put(path, "config.json", {"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.42.1"})


def a_cache(path, model):
    shutil.copytree(model, path / "snapshots" / "0123abc")


def a_training(path, model):
    for step in (500, 1000, 20):
        shutil.copytree(model, path / f"checkpoint-{step}")


def pictures(path, model):
    path.mkdir(exist_ok=True)
    (path / "mmproj-f16.gguf").write_bytes(b"GGUF")


def several(path, model):
    for name in ("a", "b"):
        shutil.copytree(model, path / name)


def weights(path, model):
    path.mkdir(exist_ok=True)
    save_file({"a": torch.ones(1)}, path / "model.safetensors")


def a_tokenizer(path, model):
    AutoTokenizer.from_pretrained(model).save_pretrained(path)


def original(path, model):
    put(path, "params.json", {"dim": 4096})
    (path / "consolidated.00.pth").write_bytes(b"")


KINDS = {
    sentence_transformers: ("a folder of sentence-transformers; its model is in ", "0_Transformer: give that folder"),
    diffusers: ("is a pipeline of diffusers (StableDiffusionPipeline); in Python", "text_encoder are models of"),
    a_part_of_diffusers: ("is a part of a pipeline of diffusers (UNet2DConditionModel)", "docs/diffusion.md"),
    a_cache: ("is a folder of the Hugging Face Hub's cache; give a snapshot in it: ", "snapshots/0123abc"),
    a_training: ("(checkpoint-20, checkpoint-500, checkpoint-1000); give one of them, ", "checkpoint-1000"),
    pictures: ("holds only GGUF files of vision towers (mmproj-f16.gguf)", "the text model's file is needed"),
    several: ("holds folders of models (a, b)", "give one of them"),
    weights: ("has weights and no config.json", "put the config.json of the model beside them"),
    a_tokenizer: ("holds a tokenizer alone", "give the folder with the model"),
    original: ("as its authors published it (params.json)", "convert"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_a_folder_is(folder, tmp_path, kind):
    kind(tmp_path / "given", folder)
    told = refused(tmp_path / "given")
    assert all(part in told for part in KINDS[kind]), told
    assert str(tmp_path / "given") in told


def test_an_empty_folder(tmp_path):
    assert "has no config.json; give a folder as model.save_pretrained writes it" in refused(tmp_path)


@pytest.mark.parametrize(("name", "told"), [
    ("tf_model.h5", "found tf_model.h5; load it with the library that wrote it"),
    ("zero_to_fp32.py", "run `python zero_to_fp32.py . .` in it first"),
    ("pytorch_model_fsdp_0", "accelerate merge-weights"),
])  # fmt: skip
def test_weights_that_are_not_read(folder, tmp_path, name, told):
    shutil.copy(folder / "config.json", tmp_path)
    (tmp_path / name).write_bytes(b"")
    line = refused(tmp_path, ("bench",))
    assert "has a config.json but no weights; needed: *.safetensors or pytorch_model*.bin; found " in line
    assert told in line
