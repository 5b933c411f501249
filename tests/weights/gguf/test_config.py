"""Keys of GGUF files that scale or cut what a model computes: each reaches the config, or is refused by its name."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from infuse.ground.errors import CheckpointError
from infuse.weights.gguf.config import config_notes, config_values
from infuse.weights.gguf.parts import open_parts
from tests.support.gguf_files import llama_values, write

SIZES = SimpleNamespace(
    max_position_embeddings=128, num_hidden_layers=4, hidden_size=64, intermediate_size=96, num_attention_heads=4,
    num_key_value_heads=2, rms_norm_eps=1e-5, rope_parameters={"rope_theta": 1e4}, head_dim=16, vocab_size=32,
)  # fmt: skip
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
NAN = float("nan")


_STATE = {
    "ssm.conv_kernel": 4, "ssm.inner_size": 64, "ssm.state_size": 16, "ssm.time_step_rank": 4, "ssm.group_count": 2,
}  # fmt: skip
# What files of these architectures must have besides.
NEEDED = {
    "gemma3": {"attention.sliding_window": 8},
    "gemma4": {
        "attention.sliding_window": 8, "attention.key_length": 16, "attention.key_length_swa": 16,
        "attention.sliding_window_pattern": [True, False] * 2, "embedding_length_per_layer_input": 0,
        "rope.freq_base_swa": 1e4,
    },
    "granite": {"logit_scale": 1.0},
    "granitehybrid": _STATE,
    "qwen35": {**_STATE, "rope.dimension_sections": [3, 3, 2, 0]},
    "lfm2moe": {"shortconv.l_cache": 3, "leading_dense_block_count": 1},
}  # fmt: skip


@pytest.fixture
def config_of(tmp_path):
    """The config's values of a file of an architecture with some keys; transformers must take them."""

    def made(architecture, keys, tensors=None):
        path = tmp_path / "model.gguf"
        keys = NEEDED.get(architecture, {}) | keys
        values = llama_values(SIZES, architecture) | {f"{architecture}.{key}": value for key, value in keys.items()}
        write(path, architecture, values, tensors or {"token_embd.weight": torch.ones(32, 64)})
        values = config_values(open_parts([path]))
        AutoConfig.for_model(values["model_type"], **{key: one for key, one in values.items() if key != "model_type"})
        return values

    return made


@pytest.mark.parametrize(
    "keys",
    (
        {"rope.scale_linear": 4.0},
        {"rope.scaling.factor": 4.0},
        {"rope.scaling.factor": 4.0, "rope.scale_linear": 2.0},
        {"rope.scaling.type": "linear", "rope.scale_linear": 4.0},
    ),
)
def test_linear_scaling_needs_no_type(config_of, keys):
    rotation = config_of("llama", keys)["rope_parameters"]
    assert rotation == {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}


@pytest.mark.parametrize(
    "keys",
    (
        {"rope.scale_linear": 1.0},
        {"rope.scaling.factor": 0.0},
        {"rope.scaling.type": "none"} | {"rope.scale_linear": 4.0},
    ),
)
def test_no_scaling(config_of, keys):
    assert config_of("llama", keys)["rope_parameters"]["rope_type"] == "default"


OWN = 0.1 * math.log(4) + 1


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    (
        ("attn_factor", 2.0, 2 * OWN),
        ("attn_factor", 1.0, OWN),
        ("yarn_attn_factor", 2.0, 2.0),
        ("yarn_log_multiplier", 0.5, OWN / (0.05 * math.log(4) + 1)),
    ),
)
def test_attention_factor_of_yarn(config_of, key, value, wanted):
    rotation = config_of("qwen3", YARN | {f"rope.scaling.{key}": value})["rope_parameters"]
    assert rotation["attention_factor"] == pytest.approx(wanted)
    assert "attention_factor" not in config_of("qwen3", YARN)["rope_parameters"]


def test_the_original_context_of_yarn(config_of):
    """As llama.cpp: the context, unless the file says another one."""
    assert config_of("llama", YARN)["rope_parameters"]["original_max_position_embeddings"] == 32
    for keys in ({key: one for key, one in YARN.items() if "original" not in key}, YARN | {[*YARN][2]: 0}):
        assert config_of("llama", keys)["rope_parameters"]["original_max_position_embeddings"] == 128


def test_attention_factor_of_phi3(config_of):
    tensors = {f"rope_factors_{name}.weight": torch.ones(8) for name in ("short", "long")}
    tensors["token_embd.weight"] = torch.ones(32, 64)
    rotation = config_of("phi3", {"rope.scaling.attn_factor": 1.5}, tensors)["rope_parameters"]
    assert rotation["rope_type"] == "longrope" and rotation["attention_factor"] == 1.5


FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")


@pytest.mark.parametrize(("architecture", "there"), (("llama", ()), ("phi3", ()), ("phi3", FACTORS[:1])))
def test_longrope_without_its_factors(config_of, architecture, there):
    tensors = {"token_embd.weight": torch.ones(32, 64)} | {name: torch.ones(8) for name in there}
    match = rf"{architecture}.rope.scaling.type is 'longrope'; possible: none, .*longrope, with {' and '.join(FACTORS)}"
    with pytest.raises(CheckpointError, match=match):
        config_of(architecture, {"rope.scaling.type": "longrope"}, tensors)


@pytest.mark.parametrize(("architecture", "there"), (("llama", FACTORS), ("qwen2", FACTORS[1:]), ("phi3", FACTORS[:1])))
def test_factors_of_another_architecture(config_of, architecture, there):
    tensors = {"token_embd.weight": torch.ones(32, 64)} | {name: torch.ones(8) for name in there}
    with pytest.raises(CheckpointError, match=f"a {architecture} has {', '.join(there)}; possible: .*of phi3"):
        config_of(architecture, {}, tensors)


def test_longrope_of_phi3(config_of):
    tensors = {"token_embd.weight": torch.ones(32, 64)} | {name: torch.linspace(1, 2, 8) for name in FACTORS}
    assert config_of("phi3", {"rope.scaling.type": "longrope"}, tensors)["rope_parameters"]["rope_type"] == "longrope"
    with pytest.raises(CheckpointError, match="phi3.rope.scaling.type is 'yarn'; possible: longrope or none"):
        config_of("phi3", YARN, tensors)


EXPERTS = {"expert_count": 2, "expert_used_count": 1, "expert_feed_forward_length": 32}
DROPPED = {
    "window": ("olmo2", "attention.sliding_window", 32, "32 (possible: 0 or 128)", (0, 128, 4096)),
    "window of qwen2": ("qwen2", "attention.sliding_window", 127, "127 (possible: 0 or 128)", (0, 128)),
    "capped scores": ("llama", "attn_logit_softcapping", 50.0, "50.0 (possible: 0)", (0.0,)),
    "capped logits": ("llama", "final_logit_softcapping", 30.0, "30.0 (possible: 0)", (0.0,)),
    "capped scores of gemma3": ("gemma3", "attn_logit_softcapping", 50.0, "50.0 (possible: 0)", (0.0,)),
    "scaled experts": ("qwen3moe", "expert_weights_scale", 2.5, "2.5 (possible: 0 or 1)", (0.0, 1.0)),
}


@pytest.mark.parametrize("name", DROPPED)
def test_keys_without_a_place_in_the_config(config_of, name):
    architecture, key, value, told, harmless = DROPPED[name]
    more = EXPERTS if architecture == "qwen3moe" else {}
    with pytest.raises(CheckpointError, match=re.escape(f"{architecture}.{key} is {told}")):
        config_of(architecture, more | {key: value})
    for value in harmless:
        config_of(architecture, more | {key: value})


def test_keys_that_nobody_looks_up_are_noted(tmp_path):
    path = tmp_path / "model.gguf"
    tensors = {"token_embd.weight": torch.ones(32, 64)}
    values = llama_values(SIZES) | {"llama.rope.scaling.finetuned": True, "general.name": "a", "other.key": 1}
    write(path, "llama", values, tensors)
    assert config_notes(open_parts([path])) == ()
    write(path, "llama", values | {"llama.attention.clamp_kqv": 8.0, "llama.new.key": 1}, tensors)
    (note,) = config_notes(open_parts([path]))
    assert note == "keys of the GGUF file that are not used: llama.attention.clamp_kqv, llama.new.key"
    write(path, "llama", values | {"llama.final_logit_softcapping": 30.0}, tensors)
    (note,) = config_notes(open_parts([path]))
    assert "config is not compared" in note and "llama.final_logit_softcapping is 30.0" in note


@pytest.mark.parametrize("architecture", ("stablelm", "nemotron", "phi3"))
def test_part_of_a_head_is_rotated(config_of, architecture):
    keys = {"rope.dimension_count": 8, "attention.layer_norm_epsilon": 1e-5}
    assert config_of(architecture, keys)["rope_parameters"]["partial_rotary_factor"] == 0.5


WINDOWED = {
    "gemma2": {},
    "gemma3": {},
    "gpt-oss": {"expert_count": 2, "expert_used_count": 1, "expert_feed_forward_length": 32},
    "cohere2": {"attention.layer_norm_epsilon": 1e-5, "logit_scale": 0.5},
}


@pytest.mark.parametrize("architecture", WINDOWED)
def test_pattern_of_windows(config_of, architecture):
    more = WINDOWED[architecture] | {"attention.sliding_window": 8}
    for pattern, wanted in ((3, "ssfs"), (2, "sfsf"), (1, "ffff"), (0, "ssss"), ([True, False, False, True], "sffs")):
        types = config_of(architecture, more | {"attention.sliding_window_pattern": pattern})["layer_types"]
        assert "".join(one[0] for one in types) == wanted
    assert "layer_types" not in config_of(architecture, more)


TOLD_BY_TENSORS = (
    *((architecture, "attn_q.bias", "attention_bias") for architecture in ("llama", "granite", "qwen3", "olmo2")),
    ("llama", "ffn_up.bias", "mlp_bias"), ("starcoder2", "attn_q.bias", "use_bias"),
    ("stablelm", "attn_q.bias", "use_qkv_bias"), ("stablelm", "attn_q_norm.weight", "qk_layernorm"),
    ("stablelm", "ffn_norm.weight", "use_parallel_residual"), ("command-r", "attn_q_norm.weight", "use_qk_norm"),
)  # fmt: skip


@pytest.mark.parametrize(("architecture", "tensor", "key"), TOLD_BY_TENSORS)
def test_what_tensors_tell(config_of, architecture, tensor, key):
    keys = {"attention.layer_norm_epsilon": 1e-5} | ({"logit_scale": 0.5} if architecture == "command-r" else {})
    tensors = {"token_embd.weight": torch.ones(32, 64)}
    without = config_of(architecture, keys, tensors)
    with_it = config_of(architecture, keys, tensors | {f"blk.0.{tensor}": torch.ones(64)})
    assert (without[key], with_it[key]) == ((True, False) if key == "use_parallel_residual" else (False, True))


def test_caps_of_gemma(config_of):
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    given = dict.fromkeys(names, 20.0)
    assert [config_of("gemma2", given)[name] for name in names] == [20, 20]
    assert [config_of("gemma2", {})[name] for name in names] == [50, 30]
    assert config_of("gemma3", {names[1]: 20.0})[names[1]] == 20 and config_of("gemma3", {})[names[1]] is None


@pytest.mark.parametrize("architecture", ("mistral", "phi3"))
def test_a_window_of_0_is_none(config_of, architecture):
    """transformers would hide every key."""
    assert config_of(architecture, {"attention.sliding_window": 8})["sliding_window"] == 8
    for keys in ({"attention.sliding_window": 0}, {}):
        assert config_of(architecture, keys)["sliding_window"] is None


@pytest.mark.parametrize(("architecture", "blocks"), (("gemma2", 46), ("gemma3", 62)))
def test_queries_of_27b_are_scaled_by_the_hidden_state(config_of, architecture, blocks):
    """As if heads tiled it: 64 / 4. The heads of other sizes are scaled by their own width."""
    for count, wanted in ((blocks, 16), (blocks - 1, 32)):
        keys = {"block_count": count, "attention.key_length": 32, "rope.dimension_count": 32}
        assert config_of(architecture, keys)["query_pre_attn_scalar"] == wanted


def test_rotation_within_windows_of_gemma3(config_of):
    rotation = config_of("gemma3", {"rope.freq_base": 1e6, "rope.freq_base_swa": 5e3})["rope_parameters"]
    assert rotation["full_attention"]["rope_theta"] == 1e6 and rotation["sliding_attention"]["rope_theta"] == 5e3


@pytest.mark.parametrize(
    ("ids", "wanted"), (({"eos": 1, "eot": 5}, [1, 5]), ({"eos": 1, "eot": 1}, 1), ({"eot": 5}, [5]))
)
def test_a_turn_ends_an_answer(tmp_path, ids, wanted):
    keys = {f"tokenizer.ggml.{name}_token_id": number for name, number in ids.items()}
    write(tmp_path / "model.gguf", "llama", llama_values(SIZES) | keys, {"token_embd.weight": torch.ones(32, 64)})
    assert config_values(open_parts([tmp_path / "model.gguf"]))["eos_token_id"] == wanted


@pytest.mark.parametrize("key", ("attention.scale", "logit_scale", "embedding_scale", "residual_scale"))
def test_scales(config_of, key):
    """Granite's config has them all, Llama's none: it takes those that change nothing."""
    name = {
        "attention.scale": "attention_multiplier", "logit_scale": "logits_scaling",
        "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
    }[key]  # fmt: skip
    assert config_of("granite", {key: 0.5})[name] == 0.5
    with pytest.raises(CheckpointError, match=rf"model.gguf: .*llama\.{key} is 0.5 \(possible: 0 or "):
        config_of("llama", {key: 0.5})
    config_of("llama", {key: 0.25 if key == "attention.scale" else 1.0})


def test_all_dropped_keys_are_in_one_error(config_of):
    keys = {"rope.dimension_count": 8, "attention.scale": 0.5, "attention.sliding_window_pattern": [True] * 4}
    match = r"qwen3.rope.dimension_count is 8 \(possible: 16\); .*pattern is .*none\); qwen3.attention.scale is 0.5"
    with pytest.raises(CheckpointError, match=match):
        config_of("qwen3", keys)


MLA = {
    "attention.key_length": 48, "attention.value_length": 32, "rope.dimension_count": 16, "attention.kv_lora_rank": 32,
    "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32,
}  # fmt: skip
BIASED = {"token_embd.weight": torch.ones(32, 64), "blk.1.exp_probs_b.bias": torch.ones(4)}


def test_the_gate_of_deepseek2(config_of):
    """A softmax unless the file says otherwise, or has a bias for the choice of experts."""
    assert config_of("deepseek2", MLA)["model_type"] == "deepseek_v2"
    assert config_of("deepseek2", MLA, BIASED)["model_type"] == "deepseek_v3"
    assert config_of("deepseek2", MLA | {"expert_gating_func": 2})["model_type"] == "deepseek_v3"
    with pytest.raises(CheckpointError, match="deepseek2.expert_gating_func is 1; possible: 2, sigmoid"):
        config_of("deepseek2", MLA | {"expert_gating_func": 1}, BIASED)


def test_layers_for_further_tokens(config_of):
    config = config_of("glm4moe", EXPERTS | {"nextn_predict_layers": 1})
    assert config["num_hidden_layers"] == 3
    with pytest.raises(CheckpointError, match="glm4moe.nextn_predict_layers is 4; possible: less than block_count, 4"):
        config_of("glm4moe", EXPERTS | {"nextn_predict_layers": 4})


@pytest.mark.parametrize("factors", ([1.0, 1e30, 1.0, 1e30], [1.0] * 7 + [2.0], [1.0] * 4))
def test_factors_of_gemma4(config_of, factors):
    tensors = {"token_embd.weight": torch.ones(32, 64), "rope_freqs.weight": torch.tensor([1.0] * 4 + [1e30] * 4)}
    whole = config_of("gemma4", {}, tensors)["rope_parameters"]["full_attention"]
    assert whole["rope_type"] == "proportional" and whole["partial_rotary_factor"] == 0.5
    with pytest.raises(CheckpointError, match=r"model.gguf: rope_freqs.weight: \(\d,\) are not 8 factors, first 1 and"):
        config_of("gemma4", {}, tensors | {"rope_freqs.weight": torch.tensor(factors)})


REFUSED = {
    "part of a head of gemma4": (
        "gemma4", {"rope.dimension_count_swa": 8}, "rope.dimension_count_swa is 8; possible: 16, the width"
    ),
    "heads of gemma4": (
        "gemma4", {"attention.head_count_kv": [2, 1, 4, 1]}, "attention.head_count_kv differs between layers"
    ),
    "a gate": ("glm4moe", EXPERTS | {"expert_gating_func": 3}, "expert_gating_func is 3; possible: 2, sigmoid"),
    "a gate of lfm2moe": (
        "lfm2moe", EXPERTS | {"expert_gating_func": 1}, "lfm2moe.expert_gating_func is 1; possible: 2, a sigmoid"
    ),
    "weights of a softmax": ("deepseek2", MLA | {"expert_weights_norm": True}, "expert_weights_norm is True; possible"),
    "a latent's keys": (
        "deepseek2", MLA | {"rope.dimension_count": 48}, "rope.dimension_count is 48; possible: less than 48"
    ),
    "a temperature": (
        "deepseek2", MLA | {"attention.temperature_scale": 0.5}, "attention.temperature_scale is 0.5 (possible: 0)"
    ),
    "pictures of glm4": ("glm4", {"rope.dimension_sections": [4, 2, 2]}, "dimension_sections is [4, 2, 2]"),
    "values of granitehybrid": (
        "granitehybrid", {"ssm.inner_size": 96, "ssm.time_step_rank": 4},
        "granitehybrid.ssm.inner_size is 96; possible: a multiple of 64, the hidden size, and of 4 heads",
    ),
    "values of qwen35": (
        "qwen35", {"ssm.inner_size": 65, "ssm.time_step_rank": 4},
        "qwen35.ssm.inner_size is 65; possible: a multiple of ssm.time_step_rank, 4",
    ),
    "a word for heads": (
        "qwen35", {"ssm.inner_size": 64, "ssm.time_step_rank": "x"}, "ssm.time_step_rank is 'x'; possible: a whole"
    ),
    "part of a head": ("llama", {"rope.dimension_count": 8}, "rope.dimension_count is 8 (possible: 16)"),
    "more than a head": (
        "stablelm", {"rope.dimension_count": 32, "attention.layer_norm_epsilon": 1e-5}, "rope.dimension_count is 32"
    ),
    "attention without yarn": ("llama", {"rope.scaling.attn_factor": 2.0}, "rope.scaling.attn_factor is 2.0"),
    "attention of phi3": ("phi3", {"rope.scaling.attn_factor": 2.0}, "rope.scaling.attn_factor is 2.0"),
    "an unlike yarn": ("llama", YARN | {"rope.scaling.yarn_ext_factor": 0.5}, "rope.scaling.yarn_ext_factor is 0.5"),
    "yarn by 0": ("llama", YARN | {"rope.scaling.factor": 0.0}, "rope.scaling.factor is 0.0; possible: a number above"),
    "yarn by nan": ("llama", YARN | {"rope.scaling.factor": NAN}, "rope.scaling.factor is nan"),
    "yarn beta": ("llama", YARN | {"rope.scaling.yarn_beta_fast": 0.0}, "rope.scaling.yarn_beta_fast is 0.0"),
    "a type": ("llama", {"rope.scaling.type": "other"}, "rope.scaling.type is 'other'; possible: none, linear, yarn"),
    "a type in numbers": ("llama", {"rope.scaling.type": 1}, "rope.scaling.type is 1; possible: a text"),
    "no heads": ("llama", {"attention.head_count": 0}, "attention.head_count is 0; possible: a whole number from 1"),
    "heads in words": ("llama", {"attention.head_count": "x"}, "attention.head_count is 'x'"),
    "heads by layer": ("llama", {"attention.head_count": [0, 0, 0, 0]}, "attention.head_count is 0"),
    "half a head": ("llama", {"attention.head_count": 65}, "attention.head_count is 65; possible: up to 64"),
    "heads true": ("llama", {"attention.head_count": True}, "attention.head_count is True"),
    "base 0": ("llama", {"rope.freq_base": 0.0}, "rope.freq_base is 0.0; possible: a number above 0"),
    "base nan": ("llama", {"rope.freq_base": NAN}, "rope.freq_base is nan"),
    "base of windows": ("gemma3", {"rope.freq_base_swa": float("inf")}, "rope.freq_base_swa is inf"),
    "no width": ("llama", {"embedding_length": 0}, "embedding_length is 0"),
    "no layers": ("llama", {"block_count": 0}, "block_count is 0"),
    "layers": ("gemma3", {"block_count": 4_000_000_000}, "block_count is 4000000000"),
    "no context": ("llama", {"context_length": 0}, "context_length is 0"),
    "a short pattern": ("gemma3", {"attention.sliding_window_pattern": [True]}, "a value for each of 4 layers"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_key_cannot_be(config_of, name):
    architecture, keys, match = REFUSED[name]
    with pytest.raises(CheckpointError, match=re.escape(match)) as raised:
        config_of(architecture, keys)
    assert "model.gguf" in str(raised.value)


def test_factors_besides_linear_scaling(config_of):
    tensors = {"token_embd.weight": torch.ones(32, 64), "rope_freqs.weight": torch.linspace(1, 2, 8)}
    assert config_of("llama", {}, tensors)["rope_parameters"]["rope_type"] == "longrope"
    with pytest.raises(
        CheckpointError, match="llama.rope.scale_linear is 4.0; possible: 1, or a file without rope_freqs"
    ):
        config_of("llama", {"rope.scale_linear": 4.0}, tensors)


def test_a_count_of_parts_is_not_believed(tmp_path, monkeypatch):
    """Nothing as long as the claimed count is made."""
    path = tmp_path / "model.gguf"
    write(path, "llama", {"split.count": 4_000_000_000}, {"output.weight": torch.ones(2, 2)})

    def within(*numbers):
        assert max(numbers) < 100
        return range(*numbers)

    monkeypatch.setattr("infuse.weights.gguf.parts.range", within, raising=False)
    with pytest.raises(CheckpointError, match="is split in 4000000000 files, and there are: model.gguf is number 1"):
        open_parts([path])
