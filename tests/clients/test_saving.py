"""Saving and loading by PyTorch and transformers: a replaced model has the original's state dict, and its files load
without infuse.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_model
from torch import Tensor, nn

import infuse
from tests.models.families import BY_NAME, FAMILIES, RELATIVES, Family, inputs
from tests.support.ranks import Ranks
from tests.support.relatives import less
from tests.support.side_by_side import original

NAMES = [family.name for family in FAMILIES]
QUANTIZED = ["int8:16", "int4:16:asymmetric", "fp8:16", "fp6:16"]
# A tied head in every format, the others in one each.
FAMILIES_AND_FORMATS = [("llama-bias", format) for format in QUANTIZED]
FAMILIES_AND_FORMATS += zip(("llama", "gpt2", "bloom", "bert", "mpt"), cycle(QUANTIZED))


def replaced(name: str, **keys: Any) -> infuse.InferenceEngine:
    return infuse.init_inference(
        BY_NAME[name].make(), **{"dtype": torch.float32, "verify": "off", "progress": False, **keys}
    )


@torch.no_grad()
def outputs(model: nn.Module, family: Family) -> list[Tensor]:
    found = model(**inputs(family))
    return [value for value in found.values() if isinstance(value, Tensor)]


def assert_close(found: list[Tensor], wanted: list[Tensor], tolerance: float = 2e-4) -> None:
    assert len(found) == len(wanted) > 0
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def by_storage(state: Mapping[str, Tensor]) -> list[list[str]]:
    """The names of tensors of one storage, which libraries take for tied ones."""
    storages: dict[tuple[int, int], list[str]] = {}
    for name, tensor in state.items():
        storage = tensor.untyped_storage()
        storages.setdefault((storage.data_ptr(), storage.nbytes()), []).append(name)
    return list(storages.values())


@pytest.mark.parametrize("name", less(RELATIVES, NAMES))
def test_state_dict_and_files_are_the_originals(name: str, tmp_path: Path) -> None:
    """Names in their order, shapes and bits; tied tensors share their memory as they did; every tensor is contiguous.
    transformers loads what is saved, and what the original had is loaded.
    """
    family = BY_NAME[name]
    engine, wanted = replaced(name), original(name).state_dict()
    found = engine.module.state_dict()
    assert list(found) == list(wanted)
    assert all(torch.equal(found[key], wanted[key]) and found[key].is_contiguous() for key in wanted)

    assert by_storage(found) == by_storage(wanted)

    engine.module.save_pretrained(tmp_path)
    again, info = family.model.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    loaded = again.state_dict()
    assert loaded.keys() == wanted.keys() and all(torch.equal(loaded[key], wanted[key]) for key in wanted)
    # Not to the last bit: products of the same weights at other addresses may add in another order.
    assert_close(outputs(again.eval(), family), outputs(original(name), family))

    other = family.make()
    with torch.no_grad():
        for tensor in other.parameters():
            tensor.mul_(0.9)
    result = engine.module.load_state_dict(other.state_dict())
    assert not result.missing_keys and not result.unexpected_keys
    assert_close(outputs(engine.module, family), outputs(other, family))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt-neox", "mixtral", "bert"])
def test_libraries_that_look_at_storages_save_every_tensor(name: str, tmp_path: Path) -> None:
    """accelerate and safetensors leave out tensors that share a storage with another."""
    model, wanted = replaced(name).module, original(name).state_dict()
    accelerate.Accelerator().save_model(model, str(tmp_path / "accelerate"))
    save_model(model, str(tmp_path / "model.safetensors"))
    torch.save(model.state_dict(), tmp_path / "state.pt")
    for saved in (
        load_file(tmp_path / "accelerate" / "model.safetensors"),
        load_file(tmp_path / "model.safetensors"),
        torch.load(tmp_path / "state.pt"),
    ):
        again = BY_NAME[name].make()
        with torch.no_grad():
            for tensor in again.parameters():
                tensor.zero_()
        result = again.load_state_dict(saved, strict=False)
        assert set(result.missing_keys) <= {key for group in by_storage(wanted) if len(group) > 1 for key in group}
        found = again.state_dict()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_what_is_written_into_a_state_dict_reaches_the_model_and_its_version() -> None:
    """Also of a piece of a merged matrix; caches of computed values ask the whole for its version."""
    model = replaced("llama").module
    state = model.state_dict()
    state["model.layers.0.self_attn.k_proj.weight"].zero_()
    [weight] = [
        module._parameters["weight"] for name, module in model.model.layers[0].named_modules() if name.endswith("qkv")
    ]
    version = weight._version
    state["model.layers.0.self_attn.v_proj.weight"].mul_(2)
    assert weight._version == version + 1
    changed = BY_NAME["llama"].make()
    with torch.no_grad():
        changed.model.layers[0].self_attn.k_proj.weight.zero_()
        changed.model.layers[0].self_attn.v_proj.weight.mul_(2)
    family = BY_NAME["llama"]
    assert_close(outputs(model, family), outputs(changed, family))


@pytest.mark.parametrize(("name", "format"), FAMILIES_AND_FORMATS)
def test_quantized_weights_are_saved_only_when_asked_for(name: str, format: str, tmp_path: Path) -> None:
    family = BY_NAME[name]
    engine = replaced(name, quant=format)
    with pytest.raises(
        infuse.UnsupportedCall, match=r"quantized \(.*save_mp_checkpoint_path=FOLDER.*infuse.dequantized"
    ):
        engine.module.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
    with infuse.dequantized(engine):
        state = engine.module.state_dict()
        engine.module.save_pretrained(tmp_path)
    with pytest.raises(infuse.UnsupportedCall):
        engine.module.state_dict()
    original = family.make()
    assert state.keys() == original.state_dict().keys()
    head, table = engine.module.get_output_embeddings(), engine.module.get_input_embeddings()
    names = {id(module): path for path, module in engine.module.named_modules()}
    tied = original.get_output_embeddings().weight is original.get_input_embeddings().weight
    assert (state[f"{names[id(head)]}.weight"].data_ptr() == state[f"{names[id(table)]}.weight"].data_ptr()) == tied
    again, info = family.model.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert_close(outputs(again.eval(), family), outputs(engine.module, family))


@pytest.mark.parametrize(("name", "format"), FAMILIES_AND_FORMATS)
def test_values_that_are_loaded_are_quantized(name: str, format: str) -> None:
    """As if they had been there before the layers were replaced; in place, so that tied tables follow."""
    family = BY_NAME[name]
    other = family.make()
    with torch.no_grad():
        for tensor in other.parameters():
            tensor.mul_(0.9)
    engine = replaced(name, quant=format)
    before = {
        path: module.data.data_ptr() for path, module in engine.module.named_modules() if hasattr(module, "format")
    }
    engine.module.load_state_dict(other.state_dict())
    assert {
        path: module.data.data_ptr() for path, module in engine.module.named_modules() if hasattr(module, "format")
    } == before
    wanted = infuse.init_inference(other, dtype=torch.float32, verify="off", progress=False, quant=format)
    assert_close(outputs(engine.module, family), outputs(wanted.module, family), 0)


@pytest.mark.parametrize("quant", [None, "int8:16"])
def test_a_part_of_a_state_dict_is_loaded(quant: str | None) -> None:
    """What is not given stays, also in a matrix that has several of the original's."""
    family, name = BY_NAME["llama"], "model.layers.1.self_attn.k_proj.weight"
    engine, original = replaced("llama", quant=quant), family.make()
    if quant:
        with infuse.dequantized(engine):
            original.load_state_dict(engine.module.state_dict())
    given = torch.randn(24, 48) / 7
    result = engine.module.load_state_dict({name: given}, strict=False)
    assert set(result.missing_keys) == set(original.state_dict()) - {name} and not result.unexpected_keys
    original.load_state_dict({name: given}, strict=False)
    assert_close(outputs(engine.module, family), outputs(original, family), 2e-2 if quant else 2e-4)


@pytest.mark.parametrize("quant", [None, "int8:16"])
def test_faults_of_a_state_dict_have_the_originals_names(quant: str | None) -> None:
    engine = replaced("llama", quant=quant)
    state = BY_NAME["llama"].make().state_dict()
    del state["model.layers.0.mlp.up_proj.weight"]
    state["model.layers.2.self_attn.v_proj.weight"] = torch.zeros(3, 3)
    state["model.layers.1.mlp.more.weight"] = torch.zeros(1)
    with pytest.raises(RuntimeError) as raised:
        engine.module.load_state_dict(state)
    text = str(raised.value)
    assert 'Missing key(s) in state_dict: "model.layers.0.mlp.up_proj.weight". ' in text
    assert 'Unexpected key(s) in state_dict: "model.layers.1.mlp.more.weight". ' in text
    assert (
        "size mismatch for model.layers.2.self_attn.v_proj.weight: the given shape is (3, 3), the model's is (24, 48)."
        in text
    )
    assert ".qkv" not in text and ".data" not in text


def test_a_part_of_a_model_has_a_state_dict() -> None:
    """By prefix, with and without the parameters themselves, into a dict that is there."""
    engine, original = replaced("gpt-neox").module, BY_NAME["gpt-neox"].make()
    for path in ("gpt_neox", "gpt_neox.layers", "gpt_neox.layers.1"):
        wanted = original.get_submodule(path).state_dict(prefix="x.")
        for keep_vars in (False, True):
            into: dict[str, Tensor] = {"other": torch.zeros(1)}
            found = engine.get_submodule(path).state_dict(destination=into, prefix="x.", keep_vars=keep_vars)
            assert found is into
            assert list(found) == ["other", *wanted]
            assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    engine.gpt_neox.layers[1].load_state_dict(original.gpt_neox.layers[0].state_dict())
    assert torch.equal(
        engine.state_dict()["gpt_neox.layers.1.attention.query_key_value.weight"],
        original.state_dict()["gpt_neox.layers.0.attention.query_key_value.weight"],
    )


@pytest.mark.parametrize("quant", [None, "int8:16"])
def test_accelerate_is_told_that_it_cannot_offload(quant: str | None, tmp_path: Path) -> None:
    """Before it takes a weight away."""
    model, ids = replaced("llama", quant=quant).module, torch.tensor([[5, 6, 7]])
    wanted = model(ids).logits
    for offload in (
        lambda: accelerate.cpu_offload(model, execution_device="cpu"),
        lambda: accelerate.disk_offload(model, str(tmp_path), execution_device="cpu"),
        lambda: accelerate.dispatch_model(model, {"model": "disk", "lm_head": "cpu"}, offload_dir=str(tmp_path)),
    ):
        with pytest.raises(infuse.UnsupportedCall, match="accelerate cannot offload"):
            offload()
    assert torch.equal(model(ids).logits, wanted)


def test_a_users_hook_sees_the_originals_names() -> None:
    """One that was there before the swap; its handle takes it off afterwards."""
    model, seen = BY_NAME["llama"].make(), []
    handle = model.model.layers[0].register_state_dict_post_hook(
        lambda module, state, prefix, metadata: seen.append(sorted(state))
    )
    infuse.init_inference(model, dtype=torch.float32, verify="off", progress=False)
    layer = model.model.layers[0]
    layer.state_dict()
    assert seen == [sorted(BY_NAME["llama"].make().model.layers[0].state_dict())]
    handle.remove()
    layer.state_dict()
    assert len(seen) == 1


@pytest.mark.parametrize("quant", [None, "int8:16"])
def test_a_copy_has_a_state_dict_of_its_own(quant: str | None) -> None:
    engine = replaced("llama-bias", quant=quant)
    twin = copy.deepcopy(engine.module)
    changed = {name: tensor * 2 for name, tensor in BY_NAME["llama-bias"].make().state_dict().items()}
    twin.load_state_dict(changed)
    wanted = BY_NAME["llama-bias"].make().state_dict()
    with infuse.dequantized(engine), infuse.dequantized(twin):
        first, second = engine.module.state_dict(), twin.state_dict()
    for name, tensor in wanted.items():
        torch.testing.assert_close(first[name], tensor, rtol=0.02, atol=0.02)
        torch.testing.assert_close(second[name], 2 * tensor, rtol=0.04, atol=0.04)


def by_rank(name: str, quant: str | None) -> list[str]:
    """What each use of a state dict says on this rank."""
    engine = replaced(name, quant=quant, tensor_parallel={"tp_size": 2})
    said = []
    original = BY_NAME[name].make().state_dict()
    for use in (engine.module.state_dict, lambda: engine.module.load_state_dict(original)):
        with pytest.raises(infuse.UnsupportedCall) as raised, infuse.dequantized(engine):
            use()
        said.append(str(raised.value))
    return said


@pytest.mark.parametrize(("name", "quant"), [("llama", None), ("llama-bias", "int8:16")])
def test_a_rank_refuses_to_save_its_part(name: str, quant: str | None, ranks: Ranks) -> None:
    for saved, loaded in ranks.run(2, by_rank, name, quant):
        assert "this rank holds a part of" in saved
        assert "save_mp_checkpoint_path=FOLDER" in saved
        assert "`infuse shard`" in saved
        assert loaded.startswith("load_state_dict") and "checkpoint=FOLDER" in loaded


SMALL = dict(
    vocab_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
)
UNKNOWN = {
    "t5": (
        t.T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4),
        t.T5ForConditionalGeneration,
    ),
    "bart": (
        t.BartConfig(
            vocab_size=96,
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_attention_heads=4,
            decoder_ffn_dim=48,
            max_position_embeddings=64,
        ),
        t.BartForConditionalGeneration,
    ),
    "glm": (t.GlmConfig(**SMALL, head_dim=8, pad_token_id=0), t.GlmForCausalLM),
}


@pytest.mark.parametrize("quant", [None, "int8:16"])
@pytest.mark.parametrize("name", UNKNOWN)
def test_models_whose_layers_stay_are_saved(name: str, quant: str | None, tmp_path: Path) -> None:
    """Those without a spec, of which linears are replaced."""
    config, make = UNKNOWN[name]
    model = make(config).eval()
    wanted = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    engine = infuse.init_inference(model, dtype=torch.float32, progress=False, quant=quant)
    assert engine.plan.steps
    with infuse.dequantized(engine):
        found = engine.module.state_dict()
        engine.module.save_pretrained(tmp_path)
    assert list(found) == list(wanted)
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=3e-2 if quant else 0)
    again, info = make.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    ids = torch.tensor([[5, 7, 9, 11]])
    given = {"input_ids": ids, "decoder_input_ids": ids} if model.config.is_encoder_decoder else {"input_ids": ids}
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(**given).logits, engine(**given).logits, rtol=1e-4, atol=1e-4)
