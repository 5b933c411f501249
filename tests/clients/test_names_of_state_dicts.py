"""Names of a state dict in libraries that look them up as paths of attributes: they resolve, or the library is refused
before it writes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate.utils import set_module_tensor_to_device
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.nn.utils import prune
from transformers.trainer_utils import load_sharded_checkpoint

import infuse
from tests.models.families import BY_NAME, inputs
from tests.support.side_by_side import replaced

NAMES = ["llama", "gpt2", "bert", "mixtral", "t5", "gpt-neox", "codegen", "gpt-oss", "gemma4-experts", "qwen3_5"]
NAMES = [name for name in NAMES if BY_NAME[name].is_there]
OPTIONS = [
    None,
    StateDictOptions(strict=False),
    StateDictOptions(full_state_dict=True),
    StateDictOptions(full_state_dict=True, cpu_offload=True),
]


def changed(name: str) -> Any:
    model = BY_NAME[name].make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    return model


@torch.no_grad()
def outputs(model: Any, name: str) -> list[Tensor]:
    return [value for value in model(**inputs(BY_NAME[name])).values() if isinstance(value, Tensor)]


def assert_alike(model: Any, wanted: Any, name: str) -> None:
    state = wanted.state_dict()
    found = model.state_dict()
    assert list(found) == list(state) and all(torch.equal(found[key], value) for key, value in state.items())
    for one, other in zip(outputs(model, name), outputs(wanted, name), strict=True):
        torch.testing.assert_close(one, other, rtol=5e-4, atol=5e-4)


def assert_untouched(model: Any, before: dict[str, Tensor]) -> None:
    found = model.state_dict()
    assert all(torch.equal(found[key], value) for key, value in before.items())


def clones(model: Any) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("options", OPTIONS, ids=["default", "not strict", "full", "full, on the CPU"])
@pytest.mark.parametrize("name", NAMES)
def test_torch_distributed_reads_and_loads(name: str, options: StateDictOptions | None) -> None:
    model, other = replaced(name), changed(name)
    found = get_model_state_dict(model, options=options)
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[key], value) for key, value in BY_NAME[name].make().state_dict().items())
    set_model_state_dict(model, dict(other.state_dict()), options=options)
    assert_alike(model, other, name)


@pytest.mark.parametrize("name", NAMES)
def test_distributed_checkpoints_are_loaded_in_place(name: str, tmp_path: Path) -> None:
    """Into the tensors of the model's state dict, as torch.distributed.checkpoint does."""
    model, other = replaced(name), changed(name)
    dcp.save(other.state_dict(), checkpoint_id=tmp_path / "original", no_dist=True)
    dcp.load(model.state_dict(), checkpoint_id=tmp_path / "original", no_dist=True)
    assert_alike(model, other, name)
    dcp.save(get_model_state_dict(model), checkpoint_id=tmp_path / "ours", no_dist=True)
    again = BY_NAME[name].make()
    dcp.load(again.state_dict(), checkpoint_id=tmp_path / "ours", no_dist=True)
    assert_alike(again, other, name)


@pytest.mark.parametrize("quant", ["int8:16", "int4:16:asymmetric"])
def test_torch_distributed_loads_values_that_are_quantized(quant: str) -> None:
    model, other = replaced("llama", quant=quant), changed("llama")
    wanted = infuse.init_inference(changed("llama"), dtype="fp32", verify="off", progress=False, quant=quant).module
    for options in OPTIONS:
        set_model_state_dict(model, dict(BY_NAME["llama"].make().state_dict()), options=options)
        set_model_state_dict(model, dict(other.state_dict()), options=options)
        assert all(torch.equal(*pair) for pair in zip(outputs(model, "llama"), outputs(wanted, "llama"), strict=True))
    with infuse.dequantized(model):
        assert get_model_state_dict(model).keys() == other.state_dict().keys()


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_loads_a_checkpoint_whole_or_is_refused(name: str, tmp_path: Path) -> None:
    model, other = replaced(name), changed(name)
    other.save_pretrained(tmp_path, save_original_format=False)
    before = clones(model)
    for place in (
        lambda: accelerate.load_checkpoint_in_model(model, str(tmp_path), device_map={"": "cpu"}),
        lambda: accelerate.load_checkpoint_and_dispatch(model, str(tmp_path), device_map={"": "cpu"}),
    ):
        with pytest.raises(infuse.UnsupportedCall, match=r"device map.*model.load_state_dict.*checkpoint=FOLDER"):
            place()
        assert_untouched(model, before)
    for load in (accelerate.load_checkpoint_in_model, accelerate.load_checkpoint_and_dispatch):
        model.load_state_dict(before)
        load(model, str(tmp_path))
        model.tie_weights()
        assert_alike(model, other, name)


@pytest.mark.parametrize("name", NAMES)
def test_transformers_loads_shards(name: str, tmp_path: Path) -> None:
    """One after the other, so that matrices merged of tensors of several files are filled in parts."""
    model, other = replaced(name), changed(name)
    other.save_pretrained(tmp_path, max_shard_size="20KB", save_original_format=False)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    load_sharded_checkpoint(model, str(tmp_path), strict=False)
    assert_alike(model, other, name)


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_sets_a_tensor_or_is_refused(name: str) -> None:
    model, other = replaced(name), BY_NAME[name].make()
    before, refused = clones(model), 0
    for key, value in changed(name).state_dict().items():
        try:
            set_module_tensor_to_device(model, key, "cpu", value=value)
        except (AttributeError, ValueError):
            refused += 1
            assert_untouched(model, before)
        else:
            set_module_tensor_to_device(other, key, "cpu", value=value)
            torch.testing.assert_close(outputs(model, name), outputs(other, name), rtol=5e-4, atol=5e-4)
            before = clones(model)
    assert refused > 10


def test_accelerate_is_refused_by_a_conv1d_of_a_layer_that_stays() -> None:
    """Its parameter is held as [out, in], and accelerate would set it as [in, out]."""
    model = replaced("gpt2", replace_with_kernel_inject=False)
    name = "transformer.h.0.attn.c_proj.weight"  # square: no shape would tell
    before, value = clones(model), torch.randn(48, 48)
    with pytest.raises(infuse.UnsupportedCall, match="load_state_dict"):
        set_module_tensor_to_device(model, name, "cpu", value=value)
    with pytest.raises(infuse.UnsupportedCall, match="accelerate cannot offload"):
        accelerate.cpu_offload(model, execution_device="cpu")
    assert_untouched(model, before)
    model.get_parameter(name).data.copy_(value)
    assert torch.equal(model.state_dict()[name], value)


@pytest.mark.parametrize("keeps_layers", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_tensors_are_found_by_their_names(name: str, keeps_layers: bool) -> None:
    """As in the original, they can be read and written."""
    model, original, other = (
        replaced(name, replace_with_kernel_inject=not keeps_layers),
        BY_NAME[name].make(),
        changed(name),
    )
    parameters = dict(original.named_parameters(remove_duplicate=False))
    for key, value in other.state_dict().items():
        find, wrong = (model.get_parameter, model.get_buffer)[:: 1 if key in parameters else -1]
        found = find(key)
        assert found.shape == value.shape and isinstance(found, nn.Parameter) == (key in parameters)
        assert torch.equal(found, original.state_dict()[key])
        with torch.no_grad():
            found.copy_(value)
            original.state_dict()[key].copy_(value)
        with pytest.raises(AttributeError):
            wrong(key)
        with pytest.raises(AttributeError):
            find(f"{key}.more")
    assert_alike(model, other, name)


def test_quantized_tensors_are_not_found() -> None:
    model = replaced("llama", quant="int8:16")
    for key in ("model.layers.0.self_attn.q_proj.weight", "lm_head.weight"):
        with pytest.raises(AttributeError):
            model.get_parameter(key)
        with pytest.raises(AttributeError):
            model.get_parameter_or_buffer(key)
    assert model.get_parameter("model.layers.0.input_layernorm.weight").shape == (48,)


@pytest.mark.parametrize("name", NAMES)
def test_functional_calls_use_the_tensors_or_raise(name: str) -> None:
    model, original = replaced(name), BY_NAME[name].make()
    given, exact = inputs(BY_NAME[name]), outputs(model, name)

    def called(module: Any, tensors: dict[str, Tensor]) -> list[Tensor]:
        with torch.no_grad():
            found = torch.func.functional_call(module, tensors, (), given, tie_weights=False)
        return [value for value in found.values() if isinstance(value, Tensor)]

    for key, value in original.state_dict().items():
        try:
            found = called(model, {key: value * 0.5})
        except (AttributeError, TypeError, infuse.UnsupportedCall):
            assert all(torch.equal(*pair) for pair in zip(outputs(model, name), exact, strict=True))
        else:
            torch.testing.assert_close(found, called(original, {key: value * 0.5}), rtol=5e-4, atol=5e-4)


ASSIGNED: dict[str, Callable[[Any], Any]] = {
    "llama": lambda model: setattr(model.model.layers[0].self_attn, "q_proj", nn.Linear(48, 48)),
    "gpt-oss": lambda model: setattr(model.model.layers[0].mlp.experts, "gate_up_proj", nn.Parameter(torch.ones(2))),
    "bert": lambda model: setattr(model.bert.encoder.layer[0], "output", nn.Identity()),
}


@pytest.mark.parametrize("name", ASSIGNED)
def test_a_name_that_nothing_reads_cannot_be_assigned(name: str) -> None:
    model = replaced(name)
    before = outputs(model, name)
    with pytest.raises(infuse.UnsupportedCall, match="nothing would read it"):
        ASSIGNED[name](model)
    assert all(torch.equal(*pair) for pair in zip(outputs(model, name), before, strict=True))


def test_parametrizations_of_what_is_gone_are_refused() -> None:
    model = replaced("llama")
    with pytest.raises(AttributeError, match="infuse replaced"):
        nn.utils.parametrizations.weight_norm(model.get_submodule("model.layers.0.self_attn.q_proj"))
    with pytest.raises((AttributeError, ValueError)):
        nn.utils.parametrize.register_parametrization(model.model.layers[0].self_attn, "q_proj.weight", nn.Identity())


def test_what_stands_in_a_parts_place_is_not_lost_in_a_state_dict() -> None:
    """Another library's module in the place of a merged matrix, which has no name in the original."""
    model: Any = BY_NAME["llama"].make()
    infuse.init_inference(model, dtype="fp32", progress=False)
    attention = model.model.layers[0].self_attn
    merged = attention.qkv
    attention.qkv = nn.Sequential(merged)
    with pytest.raises(infuse.UnsupportedCall, match=r"layers\.0\.self_attn\.qkv has been exchanged for a Sequential"):
        model.state_dict()
    attention.qkv = merged
    assert model.state_dict().keys() == BY_NAME["llama"].make().state_dict().keys()
    layer = model.model.layers[0]
    layer.mlp = nn.Identity()  # which the original has, too
    assert "model.layers.0.self_attn.q_proj.weight" in model.state_dict()


@pytest.mark.parametrize("quant", [None, "int8:16"])
def test_a_bias_that_is_no_plain_parameter(quant: str | None) -> None:
    original: Any = BY_NAME["llama"].make()
    model: Any = BY_NAME["llama"].make()
    infuse.init_inference(model, dtype="fp32", quant=quant, progress=False)
    tokens, bias = torch.arange(5, 15)[None], torch.arange(96.0)
    with torch.no_grad():
        before, exact = model(tokens).logits, original(tokens).logits
        del model.lm_head.bias
        model.lm_head.register_buffer("bias", bias)
        torch.testing.assert_close(model(tokens).logits, before + bias)
    if quant is None:
        torch.testing.assert_close(before, exact, atol=1e-4, rtol=1e-4)


def test_accelerate_moves_a_whole_model() -> None:
    model: Any = BY_NAME["llama"].make()
    infuse.init_inference(model, dtype="fp32", progress=False)
    accelerate.dispatch_model(model, device_map={"": "cpu"})
    with pytest.raises(infuse.UnsupportedCall, match="cannot offload"):
        accelerate.cpu_offload(model)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_replaced_head_is_pruned_as_the_original(name: str) -> None:
    """PyTorch puts a plain tensor in the place of the weight, which counts."""
    pruned, model = (BY_NAME[name].make(tie_word_embeddings=False) for _ in range(2))
    infuse.init_inference(model, dtype="fp32", progress=False)
    for each in (pruned, model):
        prune.l1_unstructured(each.get_output_embeddings(), "weight", 0.5)
    given = inputs(BY_NAME[name])
    with torch.no_grad():
        torch.testing.assert_close(model(**given).logits, pruned(**given).logits, atol=1e-4, rtol=1e-4)
