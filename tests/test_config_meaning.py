"""What a configuration means: dtype and weight format, notes on keys without effect, what is not available, its text
and dump.
"""

import argparse
import json
import pickle

import pytest
import torch
from test_config import GROUP, LAYER, initially, make

from infuse.config.inference import WITHOUT_EFFECT
from infuse.config.values import parse_format
from infuse.device import Device
from infuse.errors import ConfigError
from infuse.quant.parse import quant_format

CPU = Device("cpu", None, "an old CPU", ("avx2",), 0, (torch.float32, torch.bfloat16, torch.float16, torch.float64))
CPU_WITH_BF16 = Device("cpu", None, "a new CPU", ("avx2", "amx_bf16"), 0, CPU.dtypes)
GPU = Device("cuda", 0, "a GPU", ("sm_90",), 0, CPU.dtypes)
OLD_GPU = Device("cuda", 0, "an old GPU", ("sm_70",), 0, (torch.float32, torch.float16, torch.float64))


@pytest.mark.parametrize(
    ("written", "weight_format"),
    [
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
        (
            {"quant": {"enabled": True, "weight": {"num_bits": 4, "q_type": "asymmetric", "q_groups": 2}}},
            "int4:groups=2:asymmetric",
        ),
        ({"dtype": "int8", "quant": {"weight": {"q_groups": 2}}}, "int8:groups=2"),
        ({"quant": {"activation": {"enabled": True}}}, None),
        (initially({"num_bits": 4, "group_size": 128, "group_dim": 1}), "int4:128"),
        (
            {"quant": {"enabled": True, "weight": {"quantized_initialization": {"num_bits": 8, "symmetric": False}}}},
            "int8:asymmetric",
        ),
        (initially({"num_bits": 6, "group_size": 32}), "fp6:32"),
        (initially({"num_bits": 16}), None),
        (initially(None), None),
        ({"quant": {"weight": {"num_bits": 4, "quantized_initialization": "int4"}}}, "int4"),
        ({"quant": {"enabled": False, "weight": {"quantized_initialization": {"num_bits": 4}}}}, None),
        ({"quant": {"enabled": True, "weight": {"enabled": True, "post_init_quant": {"fc": "int4"}}}}, None),
        ({"quant": {"weight": {"num_bits": 8, "post_init_quant": {"fc": "int4"}}}}, "int8"),
        ({"quant": {"format": "fp8", "weight": {"post_init_quant": {"fc": "int4"}}}}, "fp8"),
        ({"dtype": "int8", "quant": {"weight": {"post_init_quant": {"fc": "int4"}}}}, "int8"),
    ],
    ids=str,
)
def test_weight_format(written, weight_format):
    config = make(written)
    assert config.weight_format == weight_format
    if weight_format is not None:
        assert parse_format(weight_format) == weight_format


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
    assert make(quant={"weight": {"enabled": False, "post_init_quant": written}}).module_formats == {}
    assert make(quant={"enabled": False, "weight": {"post_init_quant": written}}).module_formats == {}
    assert make(config.model_dump()) == config and make(json.loads(config.model_dump_json())).module_formats == formats


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


@pytest.mark.parametrize(
    ("dtype", "device", "resolved"),
    [
        (None, CPU, torch.float32),
        (None, CPU_WITH_BF16, torch.bfloat16),
        (None, GPU, torch.float16),
        ("int8", CPU, torch.float32),
        ("int8", CPU_WITH_BF16, torch.bfloat16),
        ("int8", GPU, torch.float16),
        ("fp16", CPU, torch.float16),
        ("fp32", GPU, torch.float32),
        ("bf16", GPU, torch.bfloat16),
    ],
)
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
    assert (config.tp_size, config.ep_size, config.not_available()) == (1, 1, [])


WITHOUT_EFFECT_CASES = {
    "zero": {"zero": {}},
    "triton_autotune": {"triton_autotune": True},
    "triangular_masking": {"tm": True},
    "moe.moe_experts": {"moe": {"num_experts": 2}},
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


NOT_AVAILABLE = [
    ({"moe": {"ep_size": 2}}, "moe.ep_size=2"),
    ({"moe": {"ep_group": GROUP}}, "moe.ep_group="),
    ({"moe": {"ep_mp_group": GROUP}}, "moe.ep_mp_group="),
]


@pytest.mark.parametrize(("written", "start"), NOT_AVAILABLE, ids=[start for _, start in NOT_AVAILABLE])
def test_what_this_version_cannot_serve_is_listed(written, start):
    lines = make(written).not_available()
    assert len(lines) == 1 and lines[0].startswith(start)


def test_all_that_is_not_available_is_listed_at_once():
    assert len(make(moe={"ep_size": 2, "ep_group": GROUP}).not_available()) == 2


def test_frozen():
    with pytest.raises(ValueError, match="frozen"):
        make().dtype = torch.float16


def test_text_tells_only_what_differs_from_the_defaults():
    assert str(make(replace_method="auto", tp={"tp_size": 1})) == "InferenceConfig()"
    text = str(make(dtype="half", tp={"tp_size": 2}, device="cpu", checkpoint={"checkpoints": ["part.bin"] * 100}))
    assert text.startswith(
        "InferenceConfig(dtype=torch.float16, tensor_parallel.tp_size=2, checkpoint={'checkpoints': ['part.bin'"
    )
    assert len(text) < 300


def test_dump_and_back():
    config = make(dtype="bf16", quant="int4:64", device="cpu", moe={"num_experts": 4})
    assert make(config.model_dump()) == config
    assert make(json.loads(config.model_dump_json())) == config
    assert make(config.model_dump()).notes() == config.notes()
    assert make(make().model_dump()).notes(CPU) == []
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    "text",
    [
        "int8",
        "int8:row",
        "int8:groups=2",
        "int4:128",
        "int4:32:asymmetric",
        "int4:groups=4:asymmetric",
        "fp8",
        "fp8:64",
        "fp6:groups=2",
    ],
)
def test_the_formats_are_those_that_quant_reads(text):
    assert quant_format(make(quant=text).weight_format) == quant_format(text)
