"""A tiny model of each family: its config and its tensors, back from a file, give the original's logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import infuse
from infuse.plan.kinds import BLOCK
from infuse.weights.gguf.config import config_values
from infuse.weights.gguf.names import FAMILIES
from infuse.weights.gguf.parts import open_parts
from tests.support.gguf_files import matrices_in, permuted, renamed, write

IDS = torch.arange(1, 24).unsqueeze(0)
SIZES = dict(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=1, pad_token_id=0,
)  # fmt: skip
LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
GEMMA = LAYER | {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
QWEN_MOE = LAYER | {
    "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}  # fmt: skip
MIXTRAL = LAYER | {"mlp.gate": "ffn_gate_inp"}
YARN = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 32}


@dataclass(frozen=True)
class Case:
    """`changes` of a config of `model_type`; the names of tensors in a layer; and more keys of the file."""

    architecture: str
    model_type: str
    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)
    changes: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)
    permuted: bool = False
    shifted: bool = False
    norm: str = "rms_norm_eps"


EXPERTS = {"expert_count": 4, "expert_used_count": 2}
CASES = {
    "llama": Case("llama", "llama", permuted=True, changes={"attention_bias": True}),
    "mistral": Case("llama", "llama", permuted=True, changes={"tie_word_embeddings": True}),
    "mixtral": Case(
        "llama", "mixtral", MIXTRAL, {"num_local_experts": 4, "num_experts_per_tok": 2}, EXPERTS, permuted=True
    ),
    "granite": Case(
        "granite", "granite", permuted=True,
        changes=dict(embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.25, logits_scaling=2.0),
        keys={"embedding_scale": 3.0, "residual_scale": 0.5, "attention.scale": 0.25, "logit_scale": 2.0},
    ),
    "smollm3": Case("smollm3", "smollm3", permuted=True, changes={"num_hidden_layers": 4}),
    "qwen2": Case("qwen2", "qwen2"),
    "qwen3": Case("qwen3", "qwen3", changes={"head_dim": 32}),
    "qwen3 with yarn": Case(
        "qwen3", "qwen3", changes={"head_dim": 32, "rope_parameters": YARN},
        keys={"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
    ),
    "qwen2moe": Case(
        "qwen2moe", "qwen2_moe", QWEN_MOE,
        dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=64),
        EXPERTS | {"expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 64},
    ),
    "qwen3moe": Case(
        "qwen3moe", "qwen3_moe", QWEN_MOE,
        dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=32, norm_topk_prob=True),
        EXPERTS | {"expert_feed_forward_length": 32},
    ),
    "gemma": Case("gemma", "gemma", shifted=True, changes={"head_dim": 32}),
    "gemma2": Case(
        "gemma2", "gemma2", GEMMA, shifted=True,
        changes=dict(head_dim=32, query_pre_attn_scalar=32, sliding_window=8, attn_logit_softcapping=20.0),
        keys={"attention.sliding_window": 8, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": Case(
        "gemma3", "gemma3_text", GEMMA, shifted=True,
        changes=dict(
            head_dim=32, query_pre_attn_scalar=32, sliding_window=8, num_hidden_layers=6,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
        keys={"attention.sliding_window": 8, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "phi3": Case(
        "phi3", "phi3",
        LAYER | {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
        {"pad_token_id": 0, "original_max_position_embeddings": 128},
    ),
    "olmo2": Case("olmo2", "olmo2", GEMMA),
    "starcoder2": Case(
        "starcoder2", "starcoder2", LAYER | {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}, norm="norm_epsilon"
    ),
    "stablelm": Case("stablelm", "stablelm", changes={"use_qkv_bias": True}, norm="layer_norm_eps"),
    "stablelm with norms of heads": Case(
        "stablelm", "stablelm", changes={"qk_layernorm": True, "use_parallel_residual": True}, norm="layer_norm_eps"
    ),
    "cohere": Case(
        "command-r", "cohere", changes={"logit_scale": 0.25}, keys={"logit_scale": 0.25}, norm="layer_norm_eps"
    ),
    "cohere2": Case(
        "cohere2", "cohere2", changes={"logit_scale": 0.25, "sliding_window": 8}, norm="layer_norm_eps",
        keys={"logit_scale": 0.25, "attention.sliding_window": 8},
    ),
    "nemotron": Case("nemotron", "nemotron", shifted=True, norm="norm_eps"),
    "gpt-oss": Case(
        "gpt-oss", "gpt_oss",
        LAYER | {
            "post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp", "self_attn": "attn_sinks",
        },
        dict(
            num_local_experts=4, num_experts_per_tok=2, intermediate_size=64, head_dim=32, sliding_window=8,
            rope_parameters=YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        ),
        EXPERTS | {
            "attention.sliding_window": 8, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32, "expert_feed_forward_length": 64,
        },
    ),
}  # fmt: skip


def model_of(case: Case) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(case.model_type, **{**SIZES, **case.changes})
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.normal_(0, 0.1 if parameter.dim() > 1 else 0.3)
            if "norm" in name and not case.shifted:
                parameter.add_(1)
    return model


def keys_of(case: Case, config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    keys = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
        ("attention.layer_norm_rms_epsilon" if "rms" in case.norm else "attention.layer_norm_epsilon"): getattr(
            config, case.norm
        ),
        **case.keys,
    }
    head_dim = getattr(config, "head_dim", None)
    if head_dim and head_dim != config.hidden_size // config.num_attention_heads:
        keys["attention.key_length"] = keys["attention.value_length"] = head_dim
    partial = rope.get("full_attention", rope).get("partial_rotary_factor", 1.0)
    keys["rope.dimension_count"] = int(partial * (head_dim or config.hidden_size // config.num_attention_heads))
    return {f"{case.architecture}.{key}": value for key, value in keys.items()}


def tensors_of(case: Case, model: Any) -> dict[str, torch.Tensor]:
    """The model's tensors as llama.cpp's converter writes them."""
    state = model.state_dict()
    experts = {name: tensor for name, tensor in state.items() if ".experts." in name}
    of_heads = {name: tensor for name, tensor in state.items() if ".norms." in name}
    tensors = renamed(model, case.layer, without=experts.keys() | of_heads.keys())
    for name, tensor in of_heads.items():  # one after another
        layer, leaf = name.split(".")[2], name.split(".")[4][0]
        target = f"blk.{layer}.attn_{leaf}_norm.weight"
        tensors[target] = torch.cat([*([tensors[target]] if target in tensors else []), tensor[None]])
    for name, tensor in tensors.items():
        heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
        if case.permuted and name.split(".")[2:3] and name.split(".")[2] in heads:
            tensors[name] = permuted(tensor, heads[name.split(".")[2]])
        if case.shifted and name.endswith("norm.weight"):
            tensors[name] = tensor + 1
        if name.endswith("ffn_gate_inp_shexp.weight"):
            tensors[name] = tensor[0]
    for name, tensor in experts.items():
        number, leaf = name.split(".")[2], name.rpartition(".")[2]
        kind = "bias" if leaf.endswith("_bias") else "weight"
        if case.architecture == "gpt-oss" and kind == "weight":
            tensor = tensor.transpose(1, 2)
        if leaf.startswith("down"):
            tensors[f"blk.{number}.ffn_down_exps.{kind}"] = tensor
            continue
        half = tensor.shape[1] // 2
        pair = (tensor[:, :half], tensor[:, half:])
        if case.architecture == "gpt-oss":
            pair = (tensor[:, 0::2], tensor[:, 1::2])
        for part, value in zip(("gate", "up"), pair, strict=True):
            tensors[f"blk.{number}.ffn_{part}_exps.{kind}"] = value.contiguous()
    return tensors


def test_every_family_has_a_case():
    assert {case.architecture for case in CASES.values()} | {"mistral"} == set(FAMILIES)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("type", ("F32", "Q8_0"))
def test_config_and_logits(tmp_path, name, type):
    case, path = CASES[name], tmp_path / "model.gguf"
    model = model_of(case)
    keys = keys_of(case, model.config) | {"tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.padding_token_id": 0}
    write(path, case.architecture, keys, tensors_of(case, model), matrices_in(type))
    with torch.no_grad():
        wanted = model(IDS).logits
    config = made_config(path)
    for key in {**SIZES, **case.changes}:
        assert getattr(config, key) == getattr(model.config, key) or key == "rope_parameters", key
    assert config.architectures == [type_name(model)]
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    engine = infuse.init_inference(
        empty.eval(), checkpoint=str(path), dtype=torch.float32, replace_with_kernel_inject=True
    )
    assert not [note for note in engine.plan.notes if "GGUF file" in note]
    assert sum(step.depth == BLOCK for step in engine.plan.steps) == config.num_hidden_layers, str(engine.plan)
    assert "refused" not in str(engine.plan) and " become" not in str(engine.plan)  # or logits would be the same, too
    with torch.no_grad():
        logits = engine(IDS).logits
    if type == "F32":
        torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-3)
    else:
        assert (logits - wanted).norm() < 0.1 * wanted.norm()


def made_config(path) -> Any:
    values = config_values(open_parts([path]))
    return AutoConfig.for_model(values.pop("model_type"), **values)


def type_name(model: Any) -> str:
    return type(model).__name__
