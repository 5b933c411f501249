"""Families of architectures: what a GGUF file calls the tensors of a layer, and what llama.cpp did to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from infuse.ground.errors import CheckpointError
from infuse.weights.gguf.changes import (
    Change,
    Joining,
    by_key_head,
    by_latent_head,
    convolution,
    head_columns,
    head_convolution,
    head_decay,
    head_numbers,
    head_values,
    log_decay,
    one_below_the_other,
    row,
    vector,
)

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LLAMA = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA2 = _LLAMA | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_QWEN_MOE = _LLAMA | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GPT_OSS = _LLAMA | {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
}
_DELTA = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_DELTA_CHANGES: Mapping[str, Change] = MappingProxyType({
    "attn_qkv": head_values, "attn_gate": head_values, "ssm_beta": head_numbers, "ssm_alpha": head_numbers,
    "ssm_conv1d.weight": head_convolution, "ssm_a": head_decay, "ssm_dt.bias": head_numbers, "ssm_norm": vector,
    "ssm_out": head_columns,
})  # fmt: skip
_NEXT = {
    "post_attention_norm": "post_attention_layernorm",
    "ssm_in": "linear_attn.in_proj_qkvz",  # of older files, in which the rows of keys were not taken apart
    "ssm_ba": "linear_attn.in_proj_ba",
    **{leaf: _DELTA[leaf] for leaf in ("ssm_conv1d", "ssm_a", "ssm_dt.bias", "ssm_norm", "ssm_out")},
}
_NEXT_CHANGES: Mapping[str, Change] = MappingProxyType({
    "ssm_conv1d.weight": convolution, "ssm_a": log_decay, "ssm_dt.bias": vector, "ssm_norm": vector,
})  # fmt: skip
_LFM2 = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
}
_LFM2_TOP = {"token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"}
_LFM2_EXPERTS = tuple(f"feed_forward.experts.{{}}.w{number}" for number in (1, 3, 2))
_GRANITE_HYBRID = _LLAMA | {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_down": "shared_mlp.output_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
_MAMBA_CHANGES: Mapping[str, Change] = MappingProxyType({
    "ssm_conv1d.weight": convolution, "ssm_a": log_decay, "ssm_d": vector, "ssm_norm": vector,
})  # fmt: skip
_GEMMA4 = _GEMMA2 | {
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
_GEMMA4_TOP = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_GLM4 = _LLAMA | {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
_SHARED = {
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
_MIXTRAL = ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3", "block_sparse_moe.experts.{}.w2")
_BY_EXPERT = tuple(f"mlp.experts.{{}}.{leaf}_proj" for leaf in ("gate", "up", "down"))


@dataclass(frozen=True)
class Join:
    """The tensor `name` of a layer, made by `join` of several: their names in the file, with kinds.

    `unless`: a tensor that has it all. If it is there, the parts are not used.
    """

    name: str
    parts: tuple[str, ...]
    join: Joining
    unless: str = ""


@dataclass(frozen=True)
class Family:
    """Names within a layer of `general.architecture`. `experts`: of an expert's gate, up and down.

    A name with its kind, such as `ssm_dt.bias`, stands for a whole name. `top`: names outside of layers.
    `permuted`: rows of q and k were permuted. `shifted`: 1 was added to norms. `in_one`: the experts of a layer are two
    tensors, [experts, inputs, rows], in which gate and up alternate. `stacked`: they are two tensors, [experts, rows,
    inputs], gate before up. `by_head`: the name of each head's tensor, by that of the one tensor [heads, width] in the
    file. `changes`: of values, by the name in the file; norms among them are not `shifted`. `joins`: tensors that the
    file has in parts.
    """

    layer: Mapping[str, str]
    experts: tuple[str, ...] = ()
    permuted: bool = False
    shifted: bool = False
    in_one: bool = False
    stacked: bool = False
    by_head: Mapping[str, str] = field(default_factory=dict)
    changes: Mapping[str, Change] = field(default_factory=dict)
    joins: tuple[Join, ...] = ()
    top: Mapping[str, str] = field(default_factory=dict)


FAMILIES: Mapping[str, Family] = MappingProxyType({
    "llama": Family(_LLAMA | {"ffn_gate_inp": "block_sparse_moe.gate"}, _MIXTRAL, permuted=True),
    "mistral": Family(_LLAMA, permuted=True),
    "granite": Family(_LLAMA, permuted=True),
    "smollm3": Family(_LLAMA, permuted=True),
    "qwen2": Family(_LLAMA),
    "qwen3": Family(_LLAMA),
    "qwen2moe": Family(_QWEN_MOE, _BY_EXPERT),
    "qwen3moe": Family(_QWEN_MOE, _BY_EXPERT),
    "gemma": Family(_LLAMA, shifted=True),
    "gemma2": Family(_GEMMA2, shifted=True),
    "gemma3": Family(_GEMMA2, shifted=True),
    "phi3": Family(_LLAMA | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "gpt-oss": Family(_GPT_OSS, ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), in_one=True),
    "olmo2": Family(_GEMMA2),
    "command-r": Family(_LLAMA),
    "cohere2": Family(_LLAMA),
    "stablelm": Family(_LLAMA, by_head={f"attn_{x}_norm": f"self_attn.{x}_layernorm.norms.{{}}" for x in "qk"}),
    "starcoder2": Family(_LLAMA | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "nemotron": Family(_LLAMA, shifted=True),
    "qwen35": Family(_LLAMA | _DELTA, shifted=True, changes=_DELTA_CHANGES),
    "qwen35moe": Family(_QWEN_MOE | _DELTA, _BY_EXPERT, shifted=True, changes=_DELTA_CHANGES),
    "qwen3next": Family(
        _QWEN_MOE | _NEXT, _BY_EXPERT, shifted=True, changes=_NEXT_CHANGES,
        joins=(Join("linear_attn.in_proj_qkvz.weight", ("attn_qkv.weight", "attn_gate.weight"), by_key_head),),
    ),
    "lfm2": Family(_LFM2, changes={"shortconv.conv.weight": convolution}, top=_LFM2_TOP),
    "lfm2moe": Family(_LFM2, _LFM2_EXPERTS, changes={"shortconv.conv.weight": convolution}, top=_LFM2_TOP),
    "glm4": Family(_GLM4),
    "glm4moe": Family(_LLAMA | _SHARED | {"post_attention_norm": "post_attention_layernorm"}, _BY_EXPERT),
    "deepseek2": Family(
        _LLAMA | _LATENT | _SHARED, _BY_EXPERT,
        joins=(
            Join("self_attn.kv_b_proj.weight", ("attn_k_b.weight", "attn_v_b.weight"), by_latent_head,
                 unless="attn_kv_b.weight"),
        ),
    ),
    "granitehybrid": Family(
        _GRANITE_HYBRID, ("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
        permuted=True, stacked=True, changes=_MAMBA_CHANGES,
        joins=tuple(
            Join("shared_mlp.input_linear.weight", (f"ffn_gate{leaf}", f"ffn_up{leaf}"), one_below_the_other)
            for leaf in (".weight", "_shexp.weight")
        ),
    ),
    "gemma4": Family(_GEMMA4, ("experts.gate_up_proj", "experts.down_proj"), stacked=True, top=_GEMMA4_TOP),
    "ernie4_5": Family(_LLAMA),
    "ernie4_5-moe": Family(
        _LLAMA | _SHARED | {"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"}, _BY_EXPERT,
        changes={"exp_probs_b.bias": row},
    ),
    "exaone4": Family(_LLAMA | {
        "post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
    }),
    "hunyuan-dense": Family(_LLAMA | {
        "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm",
    }),
})  # fmt: skip


def family_of(values: Mapping[str, Any], path: object) -> tuple[str, Family]:
    """The architecture of a file and its family; CheckpointError if it is not known."""
    name = values.get("general.architecture")
    if name not in FAMILIES:
        found = "no general.architecture" if name is None else f"general.architecture {name!r:.60}"
        raise CheckpointError(f"{path}: found {found}; possible: {', '.join(FAMILIES)}")
    return str(name), FAMILIES[str(name)]
