"""The configuration's errors: unknown keys, wrong values and contradictions, each said with key, found and possible."""

import pytest
from test_config import LAYER, by_name, error_of, initially


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
            {"quant": "int3"},
            [
                "quant.format (given as quant): found 'int3'; unknown quantization format 'int3'; "
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
            by_name({"fc": "int3"}),
            ["fc.format: found 'int3'; unknown quantization format 'int3'; possible: int8, int8:GROUP"],
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


def test_several_contradictions_are_told_at_once():
    text = error_of(dtype="int8", quant="fp8", min_tokens=5, max_tokens=4)
    assert text.startswith("2 problems") and "beside quant='fp8'" in text and "min_out_tokens: found 5" in text


def test_every_module_with_a_wrong_format_is_told_at_once():
    text = error_of(
        quant={
            "weight": {"post_init_quant": {"up": {"num_bits": 5}, "down": "int3", "head": {}, "gate": {"num_bits": 4}}}
        }
    )
    assert text.startswith("3 problems") and "gate" not in text
    assert all(f"quant.weight.post_init_quant.{name}" in text for name in ("up.num_bits", "down.format", "head"))
