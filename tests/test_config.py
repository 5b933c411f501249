"""The configuration as it is written: each key, alias and spelling, and the four ways to call."""

import argparse
import copy
import json
import warnings

import pytest
import torch

from infuse.config.inference import InferenceConfig
from infuse.config.quant import ModuleQuant
from infuse.config.values import parse_dtype
from infuse.errors import ConfigError

make = InferenceConfig.make


class Mpu:
    def get_model_parallel_group(self): ...
    def get_model_parallel_rank(self): ...
    def get_model_parallel_world_size(self): ...


MPU, GROUP, LAYER = Mpu(), object(), torch.nn.TransformerEncoderLayer


def initially(written):
    return {"quant": {"weight": {"quantized_initialization": written}}}


def by_name(written):
    return {"quant": {"weight": {"post_init_quant": written}}}


# How a key may be written → (dotted canonical key, canonical value).
KEYS = [
    ({"replace_with_kernel_inject": False}, "replace_with_kernel_inject", False),
    ({"kernel_inject": False}, "replace_with_kernel_inject", False),
    ({"dtype": torch.bfloat16}, "dtype", torch.bfloat16),
    ({"tensor_parallel": {"tp_size": 2}}, "tensor_parallel.tp_size", 2),
    ({"tp": {"tp_size": "2"}}, "tensor_parallel.tp_size", 2),
    ({"tp": {"enabled": False}}, "tensor_parallel.enabled", False),
    ({"tp": {"tp_grain_size": 8}}, "tensor_parallel.tp_grain_size", 8),
    ({"tp": {"mpu": MPU}}, "tensor_parallel.mpu", MPU),
    ({"tp": {"tp_group": GROUP}}, "tensor_parallel.tp_group", GROUP),
    ({"enable_cuda_graph": True}, "enable_cuda_graph", True),
    ({"use_triton": True}, "use_triton", True),
    ({"triton_autotune": True}, "triton_autotune", True),
    ({"zero": {"stage": 3}}, "zero", {"stage": 3}),
    ({"triangular_masking": False}, "triangular_masking", False),
    ({"tm": False}, "triangular_masking", False),
    ({"moe": {"enabled": False}}, "moe.enabled", False),
    ({"moe": False}, "moe.enabled", False),
    ({"moe": True}, "moe.enabled", True),
    ({"moe": {"ep_size": 2}}, "moe.ep_size", 2),
    ({"moe": {"moe_experts": [4, 8]}}, "moe.moe_experts", (4, 8)),
    ({"moe": {"num_experts": 4}}, "moe.moe_experts", (4,)),
    ({"moe": {"type": "residual"}}, "moe.type", "residual"),
    ({"moe": {"ep_mp_group": GROUP}}, "moe.ep_mp_group", GROUP),
    ({"moe": {"ep_group": GROUP}}, "moe.ep_group", GROUP),
    ({"moe": {"expert_group": GROUP}}, "moe.ep_group", GROUP),
    ({"keep_module_on_host": True}, "keep_module_on_host", True),
    ({"quant": {"enabled": True}}, "quant.enabled", True),
    ({"quant": "int4:128"}, "quant.format", "int4:128"),
    ({"quant": {"format": "int4:128:symmetric"}}, "quant.format", "int4:128"),
    ({"quant": {"activation": {"num_bits": 4}}}, "quant.activation.num_bits", 4),
    ({"quant": {"qkv": {"enabled": False}}}, "quant.qkv.enabled", False),
    ({"quant": {"weight": {"enabled": True}}}, "quant.weight.enabled", True),
    ({"quant": {"weight": {"num_bits": 4}}}, "quant.weight.num_bits", 4),
    ({"quant": {"weight": {"q_type": "asymmetric"}}}, "quant.weight.q_type", "asymmetric"),
    ({"quant": {"weight": {"q_groups": 2}}}, "quant.weight.q_groups", 2),
    (initially({"num_bits": 4}), "quant.weight.quantized_initialization.num_bits", 4),
    (initially({"group_size": 32, "num_bits": 4}), "quant.weight.quantized_initialization.group_size", 32),
    (initially({"group_dim": 1}), "quant.weight.quantized_initialization.group_dim", 1),
    (initially({"symmetric": False, "num_bits": 8}), "quant.weight.quantized_initialization.symmetric", False),
    (initially("fp6:32"), "quant.weight.quantized_initialization.format", "fp6:32"),
    (by_name({"fc": {"num_bits": 4}}), "quant.weight.post_init_quant", {"fc": ModuleQuant(num_bits=4)}),
    (by_name({"fc": "fp8"}), "quant.weight.post_init_quant", {"fc": ModuleQuant(format="fp8")}),
    (by_name({"fc": None}), "quant.weight.post_init_quant", {"fc": ModuleQuant(num_bits=16)}),
    ({"checkpoint": "model.json"}, "checkpoint", "model.json"),
    (
        {"checkpoint": {"type": "BLOOM", "checkpoints": ["a.bin"]}},
        "checkpoint",
        {"type": "BLOOM", "checkpoints": ["a.bin"]},
    ),
    ({"base_dir": "weights"}, "base_dir", "weights"),
    ({"set_empty_params": True}, "set_empty_params", True),
    ({"save_mp_checkpoint_path": "out"}, "save_mp_checkpoint_path", "out"),
    ({"checkpoint_config": {"checkpoint_dir": "in"}}, "checkpoint_config.checkpoint_dir", "in"),
    ({"ckpt_config": {"save_mp_checkpoint_path": "out"}}, "checkpoint_config.save_mp_checkpoint_path", "out"),
    ({"ckpt_config": {"base_dir": "weights"}}, "checkpoint_config.base_dir", "weights"),
    ({"return_tuple": False}, "return_tuple", False),
    ({"training_mp_size": 2}, "training_mp_size", 2),
    ({"replace_method": "auto"}, "replace_method", "auto"),
    ({"injection_policy": {LAYER: "linear2"}}, "injection_policy", {LAYER: ("linear2",)}),
    ({"injection_dict": {"T5Block": ["o", "wo"]}}, "injection_policy", {"T5Block": ("o", "wo")}),
    ({"injection_policy_tuple": ("o", "wo")}, "injection_policy_tuple", ("o", "wo")),
    ({"max_out_tokens": 64}, "max_out_tokens", 64),
    ({"max_tokens": 64}, "max_out_tokens", 64),
    ({"min_out_tokens": 2}, "min_out_tokens", 2),
    ({"min_tokens": 2}, "min_out_tokens", 2),
    ({"transposed_mode": True}, "transposed_mode", True),
    ({"verify": "strict"}, "verify", "strict"),
    ({"device": "cuda:1"}, "device", torch.device("cuda", 1)),
    ({"device": torch.device("cpu")}, "device", torch.device("cpu")),
    ({"progress": False}, "progress", False),
]
DEPRECATED = [
    ({"mp_size": 2}, "tensor_parallel.tp_size", 2, 3),
    ({"mpu": MPU}, "tensor_parallel.mpu", MPU, None),
    ({"tp_grain_size": 8}, "tensor_parallel.tp_grain_size", 8, 16),
    ({"ep_size": 2}, "moe.ep_size", 2, 3),
    ({"ep_group": GROUP}, "moe.ep_group", GROUP, None),
    ({"expert_group": GROUP}, "moe.ep_group", GROUP, None),
    ({"ep_mp_group": GROUP}, "moe.ep_mp_group", GROUP, None),
    ({"expert_mp_group": GROUP}, "moe.ep_mp_group", GROUP, None),
    ({"moe_experts": [4]}, "moe.moe_experts", (4,), [5]),
    ({"moe_type": "residual"}, "moe.type", "residual", "standard"),
]


def value_at(config, key):
    for part in key.split("."):
        config = getattr(config, part)
    return config


def nested(key, value):
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def error_of(config=None, **kwargs):
    with warnings.catch_warnings(), pytest.raises(ConfigError) as caught:
        warnings.simplefilter("ignore", DeprecationWarning)
        make(config, **kwargs)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


# --- keys, aliases, spellings ---


@pytest.mark.parametrize(
    ("written", "key", "value"), KEYS, ids=[f"{next(iter(written))}-{key}" for written, key, _ in KEYS]
)
def test_each_key_and_alias_as_dict_and_as_keyword(written, key, value):
    for config in (make(written), make(**written)):
        found = value_at(config, key)
        assert found == value and type(found) is type(value)


def test_the_key_config_and_its_alias_args_are_accepted():
    arguments = argparse.Namespace(deepspeed_config="ds.json", local_rank=0)
    assert make(args=arguments).config is arguments
    assert make({"config": {"train_batch_size": 8}}).config == {"train_batch_size": 8}


@pytest.mark.parametrize(
    ("written", "key", "value", "other"), DEPRECATED, ids=[next(iter(row[0])) for row in DEPRECATED]
)
def test_a_deprecated_key_folds_into_its_replacement_and_warns_once(written, key, value, other):
    with pytest.warns(DeprecationWarning) as caught:
        config = make(written)
    assert value_at(config, key) == value
    assert len(caught) == 1 and f"{next(iter(written))} → {key}" in str(caught[0].message)
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning):
        assert value_at(make(nested(key, next(iter(written.values()))), **written), key) == value
    assert f"{key}: has two different values" in error_of(written, **nested(key, other))


def test_all_deprecated_keys_share_one_warning():
    with pytest.warns(DeprecationWarning) as caught:
        make({"mp_size": 1}, ep_size=1, moe_type="standard")
    assert len(caught) == 1
    assert all(name in str(caught[0].message) for name in ("mp_size", "ep_size", "moe_type"))


DTYPES = {
    torch.float16: "fp16 float16 half torch.float16 torch.half",
    torch.bfloat16: "bf16 bfloat16 bfloat torch.bfloat16",
    torch.float32: "fp32 float32 float torch.float32 torch.float",
    torch.float64: "fp64 float64 double torch.float64",
    torch.int8: "int8 torch.int8",
}


@pytest.mark.parametrize(
    ("spelling", "dtype"), [(name, dtype) for dtype, names in DTYPES.items() for name in names.split()]
)
def test_each_spelling_of_a_dtype(spelling, dtype):
    assert make(dtype=spelling).dtype is dtype and make(dtype=dtype).dtype is dtype
    assert parse_dtype(spelling) is dtype


@pytest.mark.parametrize("wrong", ["fp12", torch.int32, 16, "int4"])
def test_a_wrong_dtype_lists_the_spellings(wrong):
    text = error_of(dtype=wrong)
    assert text.startswith(f"dtype: found {wrong!r}; possible: ") and "bf16|bfloat16|bfloat" in text
    assert ('quant="int4"' in text) == (wrong == "int4")


def test_defaults():
    config = make()
    assert config.dtype is None and config.replace_with_kernel_inject is True and config.max_out_tokens is None
    assert (config.min_out_tokens, config.verify, config.device, config.progress) == (1, "sample", None, None)
    assert (config.tp_size, config.ep_size, config.weight_format) == (1, 1, None)
    assert (config.return_tuple, config.triangular_masking, config.replace_method) == (True, True, "auto")
    assert config.notes() == [] and config.not_available() == [] and config.model_fields_set == set()


def test_auto_means_the_default_as_in_deepspeed():
    assert make({"dtype": "auto", "tensor_parallel": {"tp_size": "auto"}}) == make()


# --- four ways to call ---


def test_four_ways_to_call_give_the_same(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"dtype": "fp16", "tp": {"tp_size": 2}}))
    expected = make(dtype=torch.float16, tensor_parallel={"tp_size": 2})
    assert make({"dtype": torch.half, "tp": {"tp_size": 2}}) == expected
    assert make(path) == make(str(path)) == expected
    assert make(str(path), dtype="half") == expected
    assert make({"dtype": "half"}, tensor_parallel={"tp_size": 2}) == expected
    assert InferenceConfig(dtype="half", tp={"tp_size": 2}) == expected
    assert make(config={"dtype": "half"}, tp={"tp_size": 2}) == expected
    assert make() == make(None) == make({}) == InferenceConfig()


def test_an_existing_configuration_is_taken_and_merged():
    config = make(dtype="bf16", tp={"tp_size": 2}, quant="int4:64")
    assert make(config) is config
    merged = make(config, max_tokens=8, tensor_parallel={"tp_grain_size": 8})
    assert merged == make(dtype="bf16", tp={"tp_size": 2, "tp_grain_size": 8}, quant="int4:64", max_tokens=8)
    assert "dtype: has two different values" in error_of(config, dtype="fp16")
    assert make({"tp": config.tensor_parallel}).tp_size == 2


def test_sections_merge_key_by_key():
    config = make({"tp": {"tp_size": 2}}, tensor_parallel={"tp_grain_size": 8})
    assert (config.tensor_parallel.tp_size, config.tensor_parallel.tp_grain_size) == (2, 8)


def test_the_same_value_twice_is_no_conflict():
    assert (
        make({"dtype": "fp16", "kernel_inject": True}, dtype=torch.float16, replace_with_kernel_inject=True).dtype
        is torch.float16
    )
    assert make({"quant": "int8:symmetric"}, quant="int8").weight_format == "int8"
    assert make({"tp": {"mpu": MPU}}, tensor_parallel={"mpu": MPU}).tensor_parallel.mpu is MPU


@pytest.mark.parametrize(
    ("config", "kwargs", "key"),
    [
        ({"dtype": "fp16"}, {"dtype": "fp32"}, "dtype"),
        ({"max_tokens": 3}, {"max_out_tokens": 4}, "max_out_tokens"),
        ({"max_tokens": 3, "max_out_tokens": 4}, {}, "max_out_tokens"),
        ({}, {"max_tokens": 3, "max_out_tokens": 4}, "max_out_tokens"),
        ({"tp": {"tp_size": 1}}, {"tensor_parallel": {"tp_size": 2}}, "tensor_parallel.tp_size"),
        ({"quant": "int8"}, {"quant": "int4"}, "quant.format"),
        ({"moe": True}, {"moe": {"enabled": False}}, "moe.enabled"),
        ({"tp": {"mpu": MPU}}, {"tensor_parallel": {"mpu": Mpu()}}, "tensor_parallel.mpu"),
        ({"mp_size": 1}, {"tensor_parallel": {"tp_size": 2}}, "tensor_parallel.tp_size"),
    ],
)
def test_one_key_with_two_values_is_an_error(config, kwargs, key):
    text = error_of(config, **kwargs)
    assert text.startswith(f"{key}: has two different values") and text.endswith("; give one")


def test_the_callers_dict_is_never_changed_nor_kept():
    group = object()
    written = {
        "tp": {"tp_size": 2, "tp_group": group},
        "zero": {"stage": {"a": [1]}},
        "injection_policy": {LAYER: ["a"]},
        "moe": True,
    }
    before = copy.copy(written), copy.copy(written["tp"]), copy.deepcopy(written["zero"])
    config = make(written, dtype="fp16")
    assert (written, written["tp"], written["zero"]) == before
    written["zero"]["stage"]["a"].append(2)
    written["tp"]["tp_size"] = 3
    assert config.zero == {"stage": {"a": [1]}} and config.tp_size == 2
    assert config.tensor_parallel.tp_group is group


def test_groups_are_never_copied():
    class Uncopyable:
        def __deepcopy__(self, memo):
            raise AssertionError("copied")

        __copy__ = __reduce__ = __deepcopy__

    group = Uncopyable()
    assert make({"tp": {"tp_group": group}, "moe": {"ep_group": group}}).moe.ep_group is group


def test_a_json_file_that_cannot_be_used(tmp_path):
    assert "No such file" in error_of(str(tmp_path / "none.json")) and "possible: a dict, or a path" in error_of(
        "none.json"
    )
    broken = tmp_path / "broken.json"
    broken.write_text('{"dtype": ')
    assert "broken.json' is not valid JSON: Expecting value: line 1 column 11" in error_of(broken)
    broken.write_text("[1, 2]")
    assert "holds [1, 2]; possible: a JSON object" in error_of(broken)
    broken.write_text('{"dtipe": "fp16"}')
    assert "dtipe: unknown key; the nearest known one is dtype" in error_of(broken)


@pytest.mark.parametrize("wrong", [3, ["dtype"], argparse.Namespace(a=1), torch.nn.Linear(1, 1)])
def test_a_source_that_is_none(wrong):
    assert "possible: a dict, the path of a JSON file, or an InferenceConfig" in error_of(wrong)
