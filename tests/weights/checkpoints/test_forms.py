"""Each form of a checkpoint round-trips: the model on meta that is filled from it is, bit for bit, the live one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file
from torch import nn

import infuse
from infuse.layers.block import Block
from infuse.layers.linear import Quantized
from infuse.weights import fill
from infuse.weights.loader import CheckpointLoader
from tests.models.families import BY_NAME
from tests.support.checkpoints import (
    bin_shards,
    bin_single,
    description,
    description_dict,
    file_glob,
    file_list,
    loaded,
    on_meta,
    one_file,
    outputs,
    safetensors,
    safetensors_shards,
    save,
    training,
    training_nested,
    wanted,
)

FAMILIES = ["llama", "gpt2", "bloom", "falcon-40b", "bert"]


# ---- the forms: each writes a model to a folder and gives what `checkpoint` (and base_dir) are to be ----


FORMS = [
    safetensors, safetensors_shards, bin_single, bin_shards, file_list, file_glob, one_file, description,
    description_dict, training, training_nested,
]  # fmt: skip


# One family in every form, the others in three each, in turn.
FAMILIES_AND_FORMS = [("llama", form) for form in FORMS]
FAMILIES_AND_FORMS += [(name, FORMS[(3 * i + j) % 11]) for i, name in enumerate(FAMILIES[1:]) for j in range(3)]


@pytest.mark.parametrize(("name", "form"), FAMILIES_AND_FORMS, ids=lambda it: getattr(it, "__name__", it))
def test_each_form_round_trips(name: str, form: Callable[[Any, Path], Any], tmp_path: Path) -> None:
    engine = loaded(name, form(BY_NAME[name].make(), tmp_path))
    assert sum(isinstance(module, Block) for module in engine.module.modules()) == 3
    assert torch.equal(outputs(engine, name), wanted(name))
    assert not [name for name, x in (*engine.module.named_parameters(), *engine.module.named_buffers()) if x.is_meta]


KEYS = [dict(dtype="bf16"), dict(dtype="fp32", quant="int8:16"), dict(dtype="bf16", quant="int4:16")]


@pytest.mark.parametrize(
    ("name", "keys"), [*(("llama", keys) for keys in KEYS), *zip(FAMILIES[1:], cycle(KEYS))], ids=str
)
def test_dtypes_and_formats_come_out_as_from_the_live_model(name: str, keys: dict[str, Any], tmp_path: Path) -> None:
    """With the proof, which refuses nothing: the original layers run on values that are read for them alone."""
    engine = loaded(name, safetensors(BY_NAME[name].make(), tmp_path), verify="strict", **keys)
    assert sum(step.depth == "block" for step in engine.plan.steps) == 3
    assert torch.equal(outputs(engine, name), wanted(name, **keys))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_a_checkpoint_in_16_bits_into_float32(stored: torch.dtype, tmp_path: Path) -> None:
    source = safetensors(BY_NAME["llama"].make().to(stored), tmp_path)
    live = BY_NAME["llama"].make()
    with torch.no_grad():
        for parameter in live.parameters():
            parameter.copy_(parameter.to(stored))
    engine = loaded("llama", source, verify="strict")
    assert engine.module.lm_head.weight.dtype == torch.float32
    assert torch.equal(
        outputs(engine, "llama"), outputs(infuse.init_inference(live, dtype="fp32", progress=False), "llama")
    )


MORE = [
    "llama-bias", "llama-llama3", "llama-dynamic", "gemma3", "gptj", "codegen", "mpt", "albert", "vit", "clip",
    "opt-350m", "falcon-7b",
]  # fmt: skip


@pytest.mark.parametrize("name", MORE)
def test_tables_ties_and_renamed_parts(name: str, tmp_path: Path) -> None:
    """Rotary frequencies and tables are computed anew, ties are tied, transformers' former names are found."""
    engine = loaded(name, safetensors(BY_NAME[name].make(), tmp_path), verify="strict")
    assert torch.equal(outputs(engine, name), wanted(name))
    live = BY_NAME[name].make()
    for module in (live, engine.module):
        module.tied = {
            tuple(sorted(n for n, p in module.named_parameters(remove_duplicate=False) if p is q))
            for q in module.parameters()
        }
    assert {names for names in live.tied if len(names) > 1} <= engine.module.tied


def test_a_model_whose_halves_share_a_table(tmp_path: Path) -> None:
    """T5: encoder, decoder and head share one table."""
    config = t.T5Config(
        vocab_size=96, d_model=48, d_kv=12, d_ff=80, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    torch.manual_seed(0)
    live = t.T5ForConditionalGeneration(config).eval()
    live.save_pretrained(tmp_path)
    with torch.device("meta"):
        meta = t.T5ForConditionalGeneration(config).eval()
    engine = infuse.init_inference(meta, checkpoint=str(tmp_path), dtype="fp32", quant="int8:16", progress=False)
    tables = (meta.shared, meta.encoder.embed_tokens, meta.decoder.embed_tokens, meta.lm_head)
    assert len(engine.plan.steps) == 8 and all(table.weight is tables[0].weight for table in tables)
    ids = torch.arange(3, 14)[None]
    reference = infuse.init_inference(live, dtype="fp32", quant="int8:16", progress=False)
    with torch.no_grad():
        assert torch.equal(
            engine(input_ids=ids, decoder_input_ids=ids)[0], reference(input_ids=ids, decoder_input_ids=ids)[0]
        )


# ---- ways to give a model and a source ----


def empty_by_device(name: str) -> nn.Module:
    with torch.device("meta"):
        return BY_NAME[name].make()


def empty_by_moving(name: str) -> nn.Module:
    """Which unties the weights and forgets the rotary frequencies."""
    return BY_NAME[name].make().to("meta")


def empty_weights_alone(name: str) -> nn.Module:
    """As accelerate's init_empty_weights: parameters on meta, buffers with values."""
    model = BY_NAME[name].make()
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[leaf] = nn.Parameter(parameter.to("meta"))
    return model


@pytest.mark.parametrize("empty", [on_meta, empty_by_device, empty_by_moving, empty_weights_alone])
@pytest.mark.parametrize("name", ["llama-bias", "bert"])
def test_each_way_to_a_model_without_values(name: str, empty: Callable[[str], nn.Module], tmp_path: Path) -> None:
    source = safetensors(BY_NAME[name].make(), tmp_path)
    model: Any = empty(name)
    infuse.init_inference(model, checkpoint=source, dtype="fp32", progress=False)
    assert torch.equal(outputs(model, name), wanted(name))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("keys", [dict(dtype="bf16"), dict(dtype="bf16", quant="int8:16")], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_a_live_model_takes_the_values_of_the_checkpoint(name: str, keys: dict[str, Any], tmp_path: Path) -> None:
    source, other = safetensors(BY_NAME[name].make(), tmp_path), BY_NAME[name].make()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    engine = infuse.init_inference(other, checkpoint=source, verify="strict", progress=False, **keys)
    assert engine.module.dtype == torch.bfloat16 and torch.equal(outputs(engine, name), wanted(name, **keys))


@pytest.mark.parametrize("keys", ["checkpoint", "checkpoint_config", "base_dir", "path", "list"])
def test_the_configuration_says_where(keys: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(safetensors(BY_NAME["llama"].make(), tmp_path / "in" / "side"))
    monkeypatch.chdir(tmp_path)
    written: dict[str, Any] = {
        "checkpoint": {"checkpoint": os.path.join("in", "side")},
        "checkpoint_config": {"ckpt_config": {"checkpoint_dir": "side", "base_dir": str(tmp_path / "in")}},
        "base_dir": {"checkpoint": "side", "base_dir": "in"},
        "path": {"checkpoint": source},
        "list": {"checkpoint": ["model.safetensors"], "base_dir": str(source)},
    }[keys]
    engine = infuse.init_inference(on_meta("llama"), dtype="fp32", progress=False, **written)
    assert torch.equal(outputs(engine, "llama"), wanted("llama"))


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_a_base_model_from_the_checkpoint_of_a_model_with_a_head(
    name: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """The head's keys are told and left; a tied head was not saved."""
    live: Any = BY_NAME[name].make()
    base = getattr(live, live.base_model_prefix)
    live.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = type(base)(base.config, **({"add_pooling_layer": False} if name == "bert" else {})).eval()
    engine = infuse.init_inference(empty, checkpoint=str(tmp_path), dtype="fp32", progress=False)
    told = [str(warning.message) for warning in recwarn if "no place for" in str(warning.message)]
    assert len(told) == (name != "gpt2") and all(("lm_head" if name == "llama" else "cls.") in text for text in told)
    reference = infuse.init_inference(base, dtype="fp32", progress=False)
    assert torch.equal(outputs(engine, name), outputs(reference, name))


@pytest.mark.parametrize("name", ["llama-bias", "gpt2", "bloom"])
def test_a_model_with_a_tied_head_from_the_checkpoint_of_its_base_model(name: str, tmp_path: Path) -> None:
    live: Any = BY_NAME[name].make()
    getattr(live, live.base_model_prefix).save_pretrained(tmp_path)
    assert torch.equal(outputs(loaded(name, str(tmp_path)), name), wanted(name))


def test_old_names_and_old_buffers(tmp_path: Path) -> None:
    """BERT's gamma and beta; rotary frequencies of each layer; GPT-2's causal masks: as checkpoints of earlier years
    have them.
    """
    for name, change, extra in (
        (
            "bert",
            lambda key: key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"),
            {},
        ),
        ("llama", lambda key: key, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}),
        (
            "gpt2",
            lambda key: key,
            {"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.1.attn.masked_bias": torch.ones(())},
        ),
    ):
        state = {change(key): tensor for key, tensor in BY_NAME[name].make().state_dict().items()} | extra
        save(state, tmp_path / name / "pytorch_model.bin")
        assert torch.equal(outputs(loaded(name, str(tmp_path / name)), name), wanted(name))


# ---- in use ----


@pytest.mark.parametrize("name", ["llama", "albert"])
def test_all_layers_are_proven_one_at_a_time(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No two original layers have values at once, neither while inputs are recorded nor in the proofs."""
    alive: list[str] = []
    most: list[int] = []
    loaded_layer = CheckpointLoader.loaded

    @contextlib.contextmanager
    def counted(self: CheckpointLoader, path: str, **how: bool) -> Iterator[None]:
        with loaded_layer(self, path, **how):
            alive.append(path)
            most.append(len(alive))
            yield
            alive.remove(path)

    monkeypatch.setattr(CheckpointLoader, "loaded", counted)
    engine = loaded(name, safetensors(BY_NAME[name].make(), tmp_path), verify="all")
    assert not [left for left in engine.plan.left if left.why.startswith("refused")]
    assert set(most) == {1} and not alive and len(most) > 6
    assert torch.equal(outputs(engine, name), wanted(name))


def test_generate_and_hooks_after_loading(tmp_path: Path) -> None:
    live, meta = BY_NAME["llama"].make(), on_meta("llama")
    meta.generation_config = live.generation_config
    seen: list[tuple] = []
    meta.model.layers[1].register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    engine = infuse.init_inference(meta, checkpoint=safetensors(live, tmp_path), dtype="fp32", progress=False)
    prompt = torch.tensor([[5, 7, 9]])
    seen.clear()
    assert torch.equal(
        engine.generate(prompt, max_new_tokens=8, do_sample=False),
        live.generate(prompt, max_new_tokens=8, do_sample=False),
    )
    assert len(seen) == 8 and not meta.training


def test_the_bar_is_on_rank_0_alone_and_tells_of_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    source = safetensors(BY_NAME["llama"].make(), tmp_path)
    capsys.readouterr()
    monkeypatch.setenv("FORCE_COLOR", "1")
    loaded("llama", source, progress=True)
    assert "loading" in capsys.readouterr().err
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    loaded("llama", source, progress=True)
    assert capsys.readouterr().err == ""


# family → a key as it is in old checkpoints
FORMER = {
    "gpt-neox": "embed_out.weight",
    "vit": "encoder.layer.0.attention.attention.query.weight",
    "clip-text": "text_model.encoder.layers.0.mlp.fc1.weight",
    "clip-vision": "vision_model.encoder.layers.0.mlp.fc1.weight",
}


@pytest.mark.parametrize("name", list(FORMER))
def test_former_names_are_read(name: str, tmp_path: Path) -> None:
    model = BY_NAME[name].make()
    model.save_pretrained(tmp_path)  # under the former names, but for prefixes
    path, prefix = tmp_path / "model.safetensors", f"{FORMER[name].partition('.')[0]}."
    state = load_file(path)
    if name.startswith("clip"):
        state = {f"{prefix}{key}": value for key, value in state.items()}
        save_file(state, path)
    assert any(key.endswith(FORMER[name]) for key in state), list(state)
    assert not any(key.endswith(FORMER[name]) for key in model.state_dict())
    engine = infuse.init_inference(on_meta(name), checkpoint=str(tmp_path), dtype="fp32", progress=False)
    assert torch.allclose(outputs(engine, name), outputs(model, name), atol=1e-5)


def test_a_load_quantizes_each_matrix_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The swap takes what the proof has made; the embedding shares its head's weight in both."""
    BY_NAME["llama"].make(tie_word_embeddings=True).save_pretrained(tmp_path)
    seen: list[tuple[str, ...]] = []
    quantized = fill.quantized

    def counted(one: Any, *rest: Any, **how: bool) -> Any:
        seen.append(one.sources)
        return quantized(one, *rest, **how)

    monkeypatch.setattr(fill, "quantized", counted)
    model = on_meta("llama", tie_word_embeddings=True)
    keys = {"dtype": "bf16", "quant": "int8:row", "verify": "strict", "progress": False}
    infuse.init_inference(model, checkpoint=str(tmp_path), **keys)
    own = {module.data.data_ptr() for module in model.modules() if isinstance(module, Quantized)}
    assert len(seen) == len(own) == 4 * BY_NAME["llama"].values["num_hidden_layers"] + 1
