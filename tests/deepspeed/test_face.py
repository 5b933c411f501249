"""The drop-in face: the names of DeepSpeed-Inference exist and mean what they mean there."""

import argparse
import importlib
import inspect
import socket

import pytest
import torch
from torch import nn

import infuse
import infuse.deepspeed as deepspeed
from infuse.config.inference import InferenceConfig
from infuse.deepspeed import module_inject
from infuse.ground.errors import ConfigError, NotAvailable


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.experts = nn.ModuleList([nn.Linear(width, width)])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(4, 4)])
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([Layer(8), Layer(8)])


def parameters_of(function):
    return {
        name: parameter.default for name, parameter in inspect.signature(function).parameters.items() if name != "self"
    }


# --- names and signatures ---


def test_names():
    for name in deepspeed.__all__:
        assert hasattr(deepspeed, name)
    assert deepspeed.DeepSpeedInferenceConfig is InferenceConfig
    assert deepspeed.init_inference is infuse.engine.init_inference
    assert deepspeed.InferenceEngine is infuse.engine.InferenceEngine
    assert issubclass(deepspeed.InferenceEngine, nn.Module)
    assert isinstance(deepspeed.__version__, str)
    assert deepspeed.module_inject is module_inject is importlib.import_module("infuse.deepspeed.module_inject")


def test_signatures():
    empty = inspect.Parameter.empty
    assert list(parameters_of(deepspeed.init_inference)) == ["model", "config", "kwargs"]
    assert parameters_of(deepspeed.init_inference)["config"] is None
    assert parameters_of(deepspeed.init_distributed) == {
        "dist_backend": None,
        "auto_mpi_discovery": True,
        "distributed_port": 29500,
        "verbose": True,
        "timeout": None,
        "init_method": None,
        "dist_init_required": None,
        "config": None,
        "rank": -1,
        "world_size": -1,
    }
    assert parameters_of(deepspeed.OnDevice.__init__) == {"dtype": empty, "device": "meta", "enabled": True}
    slicing, quantizer = module_inject.ReplaceWithTensorSlicing, module_inject.GroupQuantizer
    assert parameters_of(slicing.__init__) == {"mp_group": None, "mp_size": 1, "out_dim": 1, "in_dim": 0}
    assert list(parameters_of(slicing.qkv_copy)) == ["dst", "src"]
    assert parameters_of(slicing.copy) == {"dst": empty, "src": empty, "int8": False, "allocate_tensor": False}
    assert parameters_of(quantizer.__init__) == {"q_int8": True, "group_size": 1, "num_bits": 8, "num_groups": 0}
    assert parameters_of(quantizer.quantize) == {"inputs": empty, "qkv": True, "count": 1, "parallel_dim": 0}
    names = ["orig_layer_impl", "model", "checkpoint_dict", "config", "model_config"]
    assert list(parameters_of(module_inject.replace_transformer_layer)) == names
    assert list(parameters_of(module_inject.generic_injection)) == ["module", "dtype", "enable_cuda_graph"]
    assert list(parameters_of(module_inject.AutoTP.tp_parser)) == ["model"]


def test_the_engine_has_deepspeeds_methods():
    for name in ("forward", "generate", "profile_model_time", "model_times", "load_model_with_checkpoint", "destroy"):
        assert callable(getattr(deepspeed.InferenceEngine, name, None)), name
    assert parameters_of(deepspeed.InferenceEngine.profile_model_time)["use_cuda_events"] is True


def test_the_default_configuration_is_a_new_dict_that_is_accepted():
    first, second = deepspeed.default_inference_config(), deepspeed.default_inference_config()
    assert type(first) is dict and first == second and first is not second
    first["dtype"] = torch.float16
    first["quant"]["weight"]["num_bits"] = 8
    assert InferenceConfig.make(first) == InferenceConfig.make(dtype="fp16", quant={"weight": {"num_bits": 8}})
    assert deepspeed.default_inference_config() == second


def test_arguments_are_added_to_a_parser():
    parser = argparse.ArgumentParser()
    assert deepspeed.add_config_arguments(parser) is parser
    found = vars(parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json"]))
    assert found == {"deepspeed": True, "deepspeed_config": "ds.json", "deepscale": False, "deepscale_config": None}


# --- OnDevice ---


def test_on_device_creates_there_and_restores():
    before = torch.get_default_dtype()
    with deepspeed.OnDevice(dtype="bf16", device="meta"):
        inside = nn.Linear(2, 2).weight
        with deepspeed.OnDevice(torch.float64, device="cpu"):
            assert torch.zeros(1).dtype is torch.float64 and torch.zeros(1).device.type == "cpu"
        assert torch.zeros(1).dtype is torch.bfloat16 and torch.zeros(1).is_meta
    assert inside.is_meta and inside.dtype is torch.bfloat16
    with pytest.raises(RuntimeError, match="inside"), deepspeed.OnDevice(torch.float16):
        raise RuntimeError("inside")
    assert torch.get_default_dtype() is before and not torch.zeros(1).is_meta


def test_on_device_disabled_int8_and_wrong():
    with deepspeed.OnDevice(dtype=torch.float16, enabled=False):
        assert torch.zeros(1).dtype is torch.get_default_dtype() and not torch.zeros(1).is_meta
    with deepspeed.OnDevice(dtype=torch.int8):
        assert torch.zeros(1).dtype is torch.float16
    with pytest.raises(ConfigError, match="dtype: found 'fp12'"):
        deepspeed.OnDevice(dtype="fp12")


def test_on_device_is_reusable_within_itself():
    context = deepspeed.OnDevice(torch.float16)
    with context, context:
        assert torch.zeros(1).is_meta
    assert not torch.zeros(1).is_meta and torch.get_default_dtype() is torch.float32


# --- init_distributed ---


@pytest.fixture
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_without_a_launcher_nothing_is_initialised(no_launcher):
    deepspeed.init_distributed()
    assert not torch.distributed.is_initialized()
    with pytest.raises(ConfigError, match="both from 0 and 1 on, or neither"):
        deepspeed.init_distributed(rank=0)


@pytest.mark.parametrize("with_address", [False, True])
def test_under_a_launcher_torch_distributed_is_initialised_once(no_launcher, with_address):
    port = free_port()
    no_launcher.setenv("RANK", "0")
    no_launcher.setenv("WORLD_SIZE", "1")
    deepspeed.init_distributed("gloo", dist_init_required=False)
    assert not torch.distributed.is_initialized()
    if with_address:
        no_launcher.setenv("MASTER_ADDR", "127.0.0.1")
        no_launcher.setenv("MASTER_PORT", str(port))
    deepspeed.init_distributed("gloo", distributed_port=port)
    assert torch.distributed.get_world_size() == 1 and torch.distributed.get_backend() == "gloo"
    deepspeed.init_distributed("gloo", distributed_port=port)


# --- module_inject ---


def test_the_name_of_the_repeated_layers():
    assert module_inject.get_transformer_name(Model()) == "model.layers"
    assert module_inject.get_transformer_name(nn.Linear(2, 2)) == ""
    with pytest.raises(ConfigError, match="model: found str; possible: an nn.Module"):
        module_inject.get_transformer_name("model")


def test_slicing_copies_equal_shapes():
    slicing = module_inject.ReplaceWithTensorSlicing()
    target, source = torch.zeros(6, 4), torch.randn(6, 4)
    copied = slicing.copy(target, source)
    assert isinstance(copied, nn.Parameter)
    assert not copied.requires_grad
    assert torch.equal(copied, source)
    assert torch.equal(target, source)
    assert torch.equal(slicing.qkv_copy(torch.zeros(6, 4), source), source)
    has_no_hooks = torch.zeros(6, 4)
    assert torch.equal(slicing.copy(has_no_hooks, source, allocate_tensor=True), source) and not has_no_hooks.any()
    assert torch.equal(slicing.copy(torch.zeros(4, 6), source, int8=True), source)
    assert slicing.copy(target, None) is None and slicing.qkv_copy(target, None) is None
    quantized = module_inject.GroupQuantizer().quantize(source)
    assert slicing.copy(torch.empty_like(quantized), quantized).scale is quantized.scale


def test_slicing_takes_the_first_ranks_part_without_a_group():
    """Of several ranks: tests/unknown/test_auto_tp.py."""
    slicing, source = module_inject.ReplaceWithTensorSlicing(mp_size=2), torch.randn(6, 12)
    target = torch.zeros(6, 6)
    copied = slicing.copy(target, source)
    assert isinstance(copied, nn.Parameter) and torch.equal(copied, source[:, :6]) and torch.equal(target, copied)
    assert torch.equal(slicing.copy(torch.zeros(3, 12), source), source[:3])
    assert torch.equal(slicing.copy(torch.zeros(6, 6), source, int8=True), source[:, :6])
    assert torch.equal(slicing.copy(torch.zeros(12, 3), source, int8=True), source[:3])
    assert torch.equal(slicing.qkv_copy(target, source), source[:, [0, 1, 4, 5, 8, 9]])
    assert torch.equal(slicing.qkv_copy(torch.zeros(6), source[0]), source[0, [0, 1, 4, 5, 8, 9]])


def test_slicing_of_wrong_shapes_is_an_error():
    slicing = module_inject.ReplaceWithTensorSlicing(mp_size=2)
    for target in (torch.zeros(6, 3), torch.zeros(6, 5), torch.zeros(6, 8)):
        with pytest.raises(ConfigError, match="mp_size=2 times as large along one axis"):
            slicing.copy(target, torch.zeros(6, 4))
    with pytest.raises(ConfigError, match="thirds of out_dim"):
        slicing.qkv_copy(torch.zeros(6, 12), torch.zeros(12, 12))
    with pytest.raises(ConfigError, match="need thirds"):
        slicing.qkv_copy(torch.zeros(4, 5), torch.zeros(4, 10))
    with pytest.raises(ConfigError, match="possible: equal shapes"):
        slicing.copy(torch.zeros(3, 2), torch.zeros(6, 4))
    with pytest.raises(ConfigError, match="meta"):
        slicing.copy(torch.zeros(2, device="meta"), torch.zeros(2))
    with pytest.raises(ConfigError, match="mp_size: found 0"):
        module_inject.ReplaceWithTensorSlicing(mp_size=0)
    with pytest.raises(ConfigError, match="out_dim, in_dim: found 1, 1"):
        module_inject.ReplaceWithTensorSlicing(in_dim=1)


@pytest.mark.parametrize(
    ("options", "groups"), [({}, 8), ({"group_size": 2}, 4), ({"num_groups": 2}, 2), ({"num_bits": 4}, 8)]
)
def test_group_quantizer(options, groups):
    weight = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    weight[0] = 0.0
    quantized = module_inject.GroupQuantizer(**options).quantize(weight)
    assert isinstance(quantized, nn.Parameter) and quantized.dtype is torch.int8 and quantized.shape == weight.shape
    assert quantized.scale.shape == (groups, 3) and quantized.scale.dtype is torch.float32
    whole, first, second = quantized.scale.flatten().split(groups)
    most = 2 ** (options.get("num_bits", 8) - 1)
    for scale, part in ((whole, weight), (first, weight[:4]), (second, weight[4:])):
        torch.testing.assert_close(scale * most, part.reshape(groups, -1).abs().amax(1))
    back = quantized.float().reshape(groups, -1) * whole[:, None]
    assert (
        (back - weight.reshape(groups, -1)).abs() <= whole[:, None] * 1.0001
    ).all()  # the largest value is clamped by one step
    assert quantized.float().abs().amax() <= most


def test_group_quantizer_that_changes_nothing_and_wrong_input():
    weight = torch.randn(8, 6)
    off, on = module_inject.GroupQuantizer(q_int8=False), module_inject.GroupQuantizer()
    for unchanged in (off.quantize(weight), on.quantize(weight, qkv=False)):
        assert torch.equal(unchanged, weight) and unchanged.dtype is torch.float32 and unchanged.scale.numel() == 1
    with pytest.raises(ConfigError, match="an even axis 0"):
        module_inject.GroupQuantizer().quantize(torch.randn(3, 4))
    with pytest.raises(ConfigError, match="num_bits: found 16"):
        module_inject.GroupQuantizer(num_bits=16)
    with pytest.raises(ConfigError, match="group_size, num_groups"):
        module_inject.GroupQuantizer(group_size=0)


def test_what_replaces_layers_validates_and_is_not_available():
    assert module_inject.AutoTP.tp_parser(Model()) == []
    with pytest.raises(ConfigError):
        module_inject.AutoTP.tp_parser("model")
    with pytest.raises(NotAvailable, match="init_inference"):
        module_inject.replace_transformer_layer(Layer, Model(), None, {"dtype": "fp16"}, None)
    with pytest.raises(ConfigError, match="orig_layer_impl: found 3"):
        module_inject.replace_transformer_layer(3, Model(), None, None, None)
    with pytest.raises(ConfigError, match="dtipe"):
        module_inject.replace_transformer_layer(None, Model(), None, {"dtipe": "fp16"}, None)
    assert module_inject.generic_injection(Model(), dtype=torch.float16) is None
    with pytest.raises(ConfigError, match="module: found SimplePipeline; possible: a pipeline of diffusers"):
        module_inject.generic_injection(type("SimplePipeline", (), {})(), dtype=torch.float16)
    with pytest.raises(ConfigError, match="dtype"):
        module_inject.generic_injection(Model(), dtype="fp12")
