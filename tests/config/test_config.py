"""The configuration: each key, alias and spelling, the four ways to call, its errors, and what it means."""

from __future__ import annotations

import argparse
import copy
import json
import pickle
import warnings

import pytest
import torch

from infuse.config.inference import WITHOUT_EFFECT, InferenceConfig
from infuse.config.quant import ModuleQuant
from infuse.config.values import parse_dtype, parse_format
from infuse.ground.device import Device
from infuse.ground.errors import ConfigError
from infuse.parallel.join import AskedRanks

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
        config = make(written, **({} if "moe_type" in written else {"moe_type": "standard"}))
    assert value_at(config, key) == value
    assert len(caught) == 1
    assert "moe_type" in str(caught[0].message)
    assert f"{next(iter(written))} → {key}" in str(caught[0].message)
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning):
        assert value_at(make(nested(key, next(iter(written.values()))), **written), key) == value
    assert f"{key}: has two different values" in error_of(written, **nested(key, other))


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
    assert config.notes() == [] and config.model_fields_set == set()


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
    with pytest.raises(ValueError, match="frozen"):
        config.dtype = torch.float32
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
    assert "No such file" in error_of(str(tmp_path / "none.json"))
    assert "possible: a dict, or a path" in error_of("none.json")
    broken = tmp_path / "broken.json"
    broken.write_text('{"dtype": ')
    assert "broken.json' is not valid JSON: Expecting value: line 1 column 11" in error_of(broken)
    broken.write_text('{"quant": {"enabled": true, "enabled": false}}')
    assert "enabled has two different values, True and False; give one" in error_of(broken)
    broken.write_text("[1, 2]")
    assert "holds [1, 2]; possible: a JSON object" in error_of(broken)
    broken.write_text('{"dtipe": "fp16"}')
    assert "dtipe: unknown key; the nearest known one is dtype" in error_of(broken)


@pytest.mark.parametrize("wrong", [3, ["dtype"], argparse.Namespace(a=1), torch.nn.Linear(1, 1)])
def test_a_source_that_is_none(wrong):
    assert "possible: a dict, the path of a JSON file, or an InferenceConfig" in error_of(wrong)


@pytest.mark.parametrize(
    ("written", "unknown", "nearest"),
    [
        ({"max_out_token": 3}, "max_out_token", "max_out_tokens"),
        ({"kernel_injection": True}, "kernel_injection", "kernel_inject"),
        ({"tp_size": 2}, "tp_size", "tensor_parallel.tp_size"),
        ({"tp": {"tp_sise": 2}}, "tp.tp_sise", "tensor_parallel.tp_size"),
        ({"tp": {"dtype": "fp16"}}, "tp.dtype", "dtype"),
        ({"quant": {"weight": {"num_bit": 4}}}, "quant.weight.num_bit", "quant.weight.num_bits"),
        ({"moe": {"num_expert": 4}}, "moe.num_expert", "moe.num_experts"),
        ({"ckpt_config": {"checkpoint_dirs": "x"}}, "ckpt_config.checkpoint_dirs", "checkpoint_config.checkpoint_dir"),
        ({"mp_sizes": 4}, "mp_sizes", "mp_size"),
        ({7: 4}, "7", ""),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(written, unknown, nearest):
    assert f"{unknown}: unknown key; the nearest known one is {nearest}" in error_of(written)


def test_all_problems_of_all_kinds_are_told_at_once():
    text = error_of(
        {"max_out_token": 3, "quant": {"wieght": {}}, "dtype": "fp16"},
        dtype="fp32",
        mp_size=0,
        verify="never",
        moe={"ep_size": -1},
        tp=3,
    )
    assert text.startswith("7 problems in the configuration:\n")
    for part in (
        "max_out_token: unknown key",
        "quant.wieght: unknown key; the nearest known one is quant.weight",
        "dtype: has two different values, dtype='fp16' and dtype='fp32'",
        "tensor_parallel.tp_size (given as mp_size): found 0",
        "verify: found 'never'; possible: 'sample', 'all', 'strict' or 'off'",
        "moe.ep_size: found -1",
        "tp: found 3; possible: a dict",
    ):
        assert part in text, part


@pytest.mark.parametrize(
    ("written", "parts"),
    [
        (
            {"tp": {"tp_size": 0}},
            ["tensor_parallel.tp_size (given as tp.tp_size): found 0", "greater than or equal to 1"],
        ),
        ({"tp": {"tp_size": 1.5}}, ["found 1.5", "integer"]),
        ({"tp": {"tp_size": True}}, ["found True", "possible: an integer"]),
        ({"tp": {"tp_grain_size": 0}}, ["found 0"]),
        (
            {"tp": {"mpu": "megatron"}},
            ["tensor_parallel.mpu", "missing: get_model_parallel_group, get_model_parallel_rank, get_model_par"],
        ),
        ({"moe": {"ep_size": 0}}, ["moe.ep_size: found 0"]),
        ({"moe": {"moe_experts": [0]}}, ["moe.moe_experts", "found 0"]),
        ({"moe": {"type": "dense"}}, ["moe.type: found 'dense'; possible: 'standard' or 'residual'"]),
        ({"moe": 3}, ["moe: found 3; possible: a bool or a dict"]),
        ({"max_out_tokens": -1}, ["max_out_tokens: found -1"]),
        ({"max_out_tokens": 0}, ["max_out_tokens: found 0"]),
        ({"max_tokens": "many"}, ["max_out_tokens (given as max_tokens): found 'many'", "integer"]),
        ({"min_out_tokens": 0}, ["min_out_tokens: found 0"]),
        ({"min_out_tokens": 9, "max_out_tokens": 8}, ["min_out_tokens: found 9; possible: at most max_out_tokens=8"]),
        ({"training_mp_size": 0}, ["training_mp_size: found 0"]),
        ({"enable_cuda_graph": "perhaps"}, ["enable_cuda_graph: found 'perhaps'", "boolean"]),
        ({"enable_cuda_graph": None}, ["enable_cuda_graph: found None"]),
        ({"quant": 8}, ["quant: found 8; possible: a dict, or a format such as"]),
        (
            {"quant": "int5"},
            [
                "quant.format (given as quant): found 'int5'; unknown quantization format 'int5'; "
                "possible: int8, int8:GROUP"
            ],
        ),
        ({"quant": "int4:0"}, ["found 'int4:0'"]),
        (
            {"quant": "fp8:asymmetric"},
            ["found 'fp8:asymmetric'; fp8 has no asymmetric form; possible: fp8, or int8 and int4"],
        ),
        ({"quant": {"weight": {"num_bits": 5}}}, ["quant.weight.num_bits: found 5; possible: 4, 6 or 8"]),
        ({"quant": {"weight": {"q_type": "both"}}}, ["possible: 'symmetric' or 'asymmetric'"]),
        ({"quant": {"weight": {"q_groups": 0}}}, ["quant.weight.q_groups: found 0"]),
        (
            {"quant": {"weight": {"num_bits": 6, "q_type": "asymmetric"}}},
            ["quant.weight: found", "6 bits with q_type symmetric"],
        ),
        (
            {"quant": "int4:5"},
            ["quant.format (given as quant): found 'int4:5'; ", "the group size must be even, not 5"],
        ),
        (by_name({"fc": {}}), ['post_init_quant.fc: found {}; possible: {"num_bits": 4, 6, 8 or 16']),
        (by_name({"fc": {"num_bits": 5}}), ["fc.num_bits: found 5; possible: 4, 6, 8 or 16"]),
        (by_name({"fc": {"group_size": 64}}), ["fc: found", "num_bits is missing; possible: 4"]),
        (by_name({"fc": {"num_bit": 4}}), ["'num_bit' is no key, the nearest one is num_bits"]),
        (
            by_name({"fc": "int5"}),
            ["fc.format: found 'int5'; unknown quantization format 'int5'; possible: int8, int8:GROUP"],
        ),
        (by_name({"fc": {"num_bits": 6, "symmetric": False}}), ["possible: 6 bits with symmetric=True"]),
        (by_name({"fc": {"num_bits": 4, "group_size": 5}}), ["group size must be even, not 5"]),
        (by_name({"fc": {"format": "fp8", "num_bits": 8}}), ["possible: format alone, or num_bits"]),
        (by_name(["fc"]), ["post_init_quant: found ['fc']", "dictionary"]),
        (initially({"num_bits": 3}), ["initialization.num_bits: found 3; possible: 4, 6"]),
        (initially({"bits": 4}), ["quantized_initialization.bits: unknown key"]),
        (initially(4), ["quantized_initialization: found 4; possible: a dict with num_bits"]),
        (
            {"quant": {"weight": {"num_bits": 8, "quantized_initialization": {"num_bits": 4}}}},
            ["quantized_initialization: found 'int4' beside num_bits, q_type and q_groups, which say 'int8'"],
        ),
        (
            {"quant": {"format": "fp8", "weight": {"quantized_initialization": {"num_bits": 4}}}},
            ["quant.format: found 'fp8' beside quant.weight, which says 'int4'"],
        ),
        (
            {"quant": {"format": "int8", "weight": {"num_bits": 4}}},
            ["quant.format: found 'int8' beside quant.weight, which says 'int4'"],
        ),
        ({"dtype": "int8", "quant": "int4"}, ["dtype: found torch.int8 beside quant='int4'"]),
        ({"dtype": "int8", "quant": {"weight": {"num_bits": 4}}}, ["dtype: found torch.int8 beside quant='int4'"]),
        ({"dtype": "int8", "quant": {"enabled": False}}, ["dtype: found torch.int8 beside quant.enabled=False"]),
        ({"injection_policy": {3: "a"}}, ["injection_policy: found {3: 'a'}", "not [3]"]),
        ({"injection_policy": {LAYER: 4}}, ["injection_policy", "not [4]"]),
        ({"injection_policy": {LAYER: ("a", 4)}}, ["not [('a', 4)]"]),
        ({"injection_policy": {LAYER: ()}}, ["not [()]"]),
        ({"injection_policy": [LAYER]}, ["injection_policy", "dictionary"]),
        ({"checkpoint": {"type": "BLOOM"}}, ["checkpoint: found {'type': 'BLOOM'}", 'a dict with "checkpoints"']),
        ({"checkpoint": 3}, ["checkpoint: found 3"]),
        ({"checkpoint": ""}, ["checkpoint: found ''"]),
        (
            {"base_dir": "a", "ckpt_config": {"base_dir": "b"}},
            ["base_dir: found 'a' beside checkpoint_config.base_dir='b'"],
        ),
        ({"zero": 3}, ["zero: found 3", "dictionary"]),
        ({"device": "nowhere:1"}, ["device: found 'nowhere:1'; possible: a torch.device or its name"]),
        ({"device": 1.5}, ["device: found 1.5"]),
        ({"progress": 7}, ["progress: found 7"]),
    ],
    ids=str,
)
def test_a_wrong_value_says_key_found_and_possible(written, parts):
    text = error_of(written)
    for part in parts:
        assert part in text, text
    assert "pydantic" not in text and "validation error" not in text


def test_every_module_with_a_wrong_format_is_told_at_once():
    text = error_of(
        quant={
            "weight": {"post_init_quant": {"up": {"num_bits": 5}, "down": "int5", "head": {}, "gate": {"num_bits": 4}}}
        }
    )
    assert text.startswith("3 problems") and "gate" not in text
    assert all(f"quant.weight.post_init_quant.{name}" in text for name in ("up.num_bits", "down.format", "head"))


CPU = Device("cpu", None, "an old CPU", ("avx2",), 0, (torch.float32, torch.bfloat16, torch.float16, torch.float64))
CPU_WITH_BF16 = Device("cpu", None, "a new CPU", ("avx2", "amx_bf16"), 0, CPU.dtypes)
GPU = Device("cuda", 0, "a GPU", ("sm_90",), 0, CPU.dtypes)
OLD_GPU = Device("cuda", 0, "an old GPU", ("sm_70",), 0, (torch.float32, torch.float16, torch.float64))


@pytest.mark.parametrize(("written", "weight_format"), [
    ({}, None),
    ({"dtype": "int8"}, "int8"),
    ({"dtype": torch.int8, "quant": "int8:128"}, "int8:128"),
    ({"quant": "fp6"}, "fp6"),
    ({"quant": "INT4:64:asymmetric"}, "int4:64:asymmetric"),
    ({"quant": "int8:groups=1"}, "int8:groups=1"),
    ({"quant": "int4:row:symmetric"}, "int4:row"),
    ({"quant": {"weight": {"q_groups": 1}}}, "int8:groups=1"),
    ({"quant": "int8:groups=4"}, "int8:groups=4"),
    ({"quant": None}, None),
    ({"quant": {}}, None),
    ({"quant": {"enabled": True}}, "int8"),
    ({"quant": {"enabled": False, "weight": {"num_bits": 4}}}, None),
    ({"quant": {"weight": {"enabled": True}}}, "int8"),
    ({"quant": {"weight": {"enabled": False, "num_bits": 4}}}, None),
    ({"quant": {"weight": {"num_bits": 8}}}, "int8"),
    ({"quant": {"weight": {"num_bits": 6}}}, "fp6"),
    ({"quant": {"enabled": True, "weight": {"num_bits": 4, "q_type": "asymmetric", "q_groups": 2}}},
     "int4:groups=2:asymmetric"),
    ({"dtype": "int8", "quant": {"weight": {"q_groups": 2}}}, "int8:groups=2"),
    ({"quant": {"activation": {"enabled": True}}}, None),
    (initially({"num_bits": 4, "group_size": 128, "group_dim": 1}), "int4:128"),
    ({"quant": {"enabled": True, "weight": {"quantized_initialization": {"num_bits": 8, "symmetric": False}}}},
     "int8:asymmetric"),
    (initially({"num_bits": 6, "group_size": 32}), "fp6:32"),
    (initially({"num_bits": 16}), None),
    (initially(None), None),
    ({"quant": {"weight": {"num_bits": 4, "quantized_initialization": "int4"}}}, "int4"),
    ({"quant": {"enabled": False, "weight": {"quantized_initialization": {"num_bits": 4}}}}, None),
    ({"quant": {"enabled": True, "weight": {"enabled": True, "post_init_quant": {"fc": "int4"}}}}, None),
    ({"quant": {"weight": {"num_bits": 8, "post_init_quant": {"fc": "int4"}}}}, "int8"),
    ({"quant": {"format": "fp8", "weight": {"post_init_quant": {"fc": "int4"}}}}, "fp8"),
    ({"dtype": "int8", "quant": {"weight": {"post_init_quant": {"fc": "int4"}}}}, "int8"),
], ids=str)  # fmt: skip
def test_weight_format(written, weight_format):
    config = make(written)
    assert config.weight_format == weight_format
    if weight_format is not None:
        assert parse_format(weight_format) == weight_format


@pytest.mark.parametrize(
    "weight",
    [
        {"post_init_quant": {"a": {"num_bits": 4, "group_dim": 1}, "b": {"num_bits": 4, "group_dim": 0}}},
        {"quantized_initialization": {"num_bits": 4, "group_dim": 0}},
    ],
)
def test_groups_along_the_outputs_are_told_to_have_no_effect(weight):
    (note,) = make(quant={"weight": weight}).notes(CPU)
    assert note.startswith(f"quant.weight.{next(iter(weight))}") and "groups lie along the inputs" in note


@pytest.mark.parametrize(("dtype", "device", "resolved"), [
    (None, CPU, torch.float32), (None, CPU_WITH_BF16, torch.bfloat16), (None, GPU, torch.float16),
    ("int8", CPU, torch.float32), ("int8", CPU_WITH_BF16, torch.bfloat16), ("int8", GPU, torch.float16),
    ("fp16", CPU, torch.float16), ("fp32", GPU, torch.float32), ("bf16", GPU, torch.bfloat16),
])  # fmt: skip
def test_resolved_dtype(dtype, device, resolved):
    assert make(dtype=dtype).resolved_dtype(device) is resolved


def test_a_dtype_that_the_device_does_not_compute_in():
    with pytest.raises(
        ConfigError,
        match=r"found torch.bfloat16; cuda an old GPU computes in torch.float32, torch.float16, torch.float64",
    ):
        make(dtype="bf16").resolved_dtype(OLD_GPU)


def test_a_section_that_is_off_asks_for_one_rank():
    config = make(
        tp={"enabled": False, "tp_size": 4, "tp_group": GROUP}, moe={"enabled": False, "ep_size": 4, "ep_group": GROUP}
    )
    assert (config.tp_size, config.ep_size, config.ranks) == (1, 1, AskedRanks())


WITHOUT_EFFECT_CASES = {
    "zero": {"zero": {}},
    "triton_autotune": {"triton_autotune": True},
    "triangular_masking": {"tm": True},
    "moe.type": {"moe": {"type": "residual"}},
    "keep_module_on_host": {"keep_module_on_host": True},
    "quant.activation": {"quant": {"activation": {"enabled": True}}},
    "quant.qkv": {"quant": {"qkv": {"enabled": True}}},
    "set_empty_params": {"set_empty_params": True},
    "return_tuple": {"return_tuple": True},
    "training_mp_size": {"training_mp_size": 1},
    "replace_method": {"replace_method": "auto"},
    "injection_policy_tuple": {"injection_policy_tuple": ("a",)},
    "config": {"args": argparse.Namespace(deepspeed_config=None)},
    "transposed_mode": {"transposed_mode": True},
}


def test_each_key_without_effect_is_noted_when_it_is_set():
    assert set(WITHOUT_EFFECT_CASES) == set(WITHOUT_EFFECT)
    for key, written in WITHOUT_EFFECT_CASES.items():
        assert make(written).notes() == [f"{key}: accepted without effect: {WITHOUT_EFFECT[key]}"]
    with pytest.raises(TypeError):
        WITHOUT_EFFECT["dtype"] = "read-only"


@pytest.mark.parametrize("key", ["enable_cuda_graph", "use_triton"])
def test_keys_without_effect_on_a_cpu(key):
    config = make({key: True})
    assert len(config.notes(CPU)) == 1 and config.notes(CPU)[0].startswith(f"{key}: no effect here: ")
    assert config.notes(GPU) == config.notes() == make({key: False}).notes(CPU) == []
    assert make({key: True}, device="cpu").notes() == config.notes(CPU)


def test_keys_that_need_another_key_to_have_an_effect():
    assert make(tp={"tp_grain_size": 8}).notes()[0].startswith("tensor_parallel.tp_grain_size: no effect here")
    assert make(tp={"tp_grain_size": 8, "tp_size": 2}).notes() == []
    assert make(injection_policy={LAYER: "linear2"}).notes()[0].startswith("injection_policy: no effect here")
    assert make(injection_policy={LAYER: "linear2"}, mp_size=2).notes() == []
    assert make(min_tokens=4).notes()[0].startswith("min_out_tokens: no effect here")
    assert make(min_tokens=4, max_tokens=8).notes() == []


def test_text_tells_only_what_differs_from_the_defaults():
    assert str(make(replace_method="auto", tp={"tp_size": 1})) == "InferenceConfig()"
    text = str(make(dtype="half", tp={"tp_size": 2}, device="cpu", checkpoint={"checkpoints": ["part.bin"] * 100}))
    assert text.startswith(
        "InferenceConfig(dtype=torch.float16, tensor_parallel.tp_size=2, checkpoint={'checkpoints': ['part.bin'"
    )
    assert len(text) < 300


def test_formats_by_name():
    written = {
        "down": {"num_bits": 8, "group_size": 32, "symmetric": False},
        "q_proj": {"num_bits": 4, "group_dim": 1},
        "up": "fp6",
        "head": {"num_bits": 16},
        "gate": None,
    }
    formats = {"down": "int8:32:asymmetric", "q_proj": "int4", "up": "fp6", "head": None, "gate": None}
    config = make(quant={"weight": {"post_init_quant": written}})
    assert config.module_formats == formats and config.weight_format is None and config.notes(CPU) == []
    for off in (
        {"weight": {"enabled": False, "post_init_quant": written}},
        {"enabled": False, "weight": {"post_init_quant": written}},
    ):
        assert make(quant=off).module_formats == {}
    assert make(config.model_dump()) == config and make(json.loads(config.model_dump_json())).module_formats == formats


def test_dump_and_back():
    config = make(dtype="bf16", quant="int4:64", device="cpu", moe={"num_experts": 4})
    assert make(config.model_dump()) == config
    assert make(json.loads(config.model_dump_json())) == config
    assert make(config.model_dump()).notes() == config.notes()
    assert make(make().model_dump()).notes(CPU) == []
    assert pickle.loads(pickle.dumps(config)) == config
