"""Cases of families in which some layers keep a state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.weights.gguf.cases.case import EXPERTS, LAYER, QWEN_MOE, Case, Tensors

DELTA = {
    "post_attention_layernorm": "post_attention_norm", "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d", "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
}  # fmt: skip
DELTA_SIZES = dict(
    num_hidden_layers=4, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=16,
    linear_value_head_dim=32,
)  # fmt: skip
DELTA_KEYS = {
    "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 6, "ssm.inner_size": 192,
    "full_attention_interval": 4,
}  # fmt: skip
SECTIONS = {"rope.dimension_sections": [11, 11, 10, 0]}


def tiled(tensor: Tensor, heads: int, keys: int, axis: int = 0) -> Tensor:
    """`heads` along an axis, which are listed key by key, with the first head of each key before all second ones."""
    parts = tensor.chunk(heads, axis)
    return torch.cat(
        [parts[key * (heads // keys) + turn] for turn in range(heads // keys) for key in range(keys)], axis
    )


def delta_written(tensors: Tensors, config: Any) -> None:
    heads, keys = config.linear_num_value_heads, config.linear_num_key_heads
    values = heads * config.linear_value_head_dim
    for name, tensor in tensors.items():
        leaf = name.split(".", 2)[-1]
        if leaf == "ssm_conv1d.weight":
            tensor = tensor.squeeze(1)
        if leaf == "ssm_a":
            tensor = -tensor.exp()
        if leaf in ("ssm_conv1d.weight", "attn_qkv.weight"):
            tensor = torch.cat([tensor[:-values], tiled(tensor[-values:], heads, keys)])
        elif leaf in ("ssm_a", "ssm_dt.bias", "ssm_alpha.weight", "ssm_beta.weight", "attn_gate.weight"):
            tensor = tiled(tensor, heads, keys)
        elif leaf == "ssm_out.weight":
            tensor = tiled(tensor, heads, keys, axis=1)
        tensors[name] = tensor


def next_written(tensors: Tensors, config: Any) -> None:
    """Rows of queries, keys, values and the gate, which are listed by head of keys, each in one piece."""
    keys, values = config.linear_key_head_dim, config.linear_value_head_dim
    values *= config.linear_num_value_heads // config.linear_num_key_heads
    for name, tensor in list(tensors.items()):
        layer, leaf = name.rpartition(".ssm")[0], name.split(".", 2)[-1]
        if leaf == "ssm_conv1d.weight":
            tensors[name] = tensor.squeeze(1)
        if leaf == "ssm_a":
            tensors[name] = -tensor.exp()
        if leaf == "ssm_in.weight":
            heads = tensor.view(config.linear_num_key_heads, -1, tensor.shape[1])
            *qkv, gate = (part.flatten(0, 1) for part in heads.split([keys, keys, values, values], dim=1))
            del tensors[name]
            tensors |= {f"{layer}.attn_qkv.weight": torch.cat(qkv), f"{layer}.attn_gate.weight": gate}


def former_next_written(tensors: Tensors, config: Any) -> None:
    """As the converter wrote them at first."""
    for name, tensor in tensors.items():
        leaf = name.split(".", 2)[-1]
        tensors[name] = -tensor.exp() if leaf == "ssm_a" else tensor.squeeze(1) if "conv1d" in leaf else tensor


def without_middle_axis(tensors: Tensors, config: Any) -> None:
    for name, tensor in tensors.items():
        tensors[name] = tensor.squeeze(1) if "shortconv.conv" in name else tensor


def mamba_written(tensors: Tensors, config: Any) -> None:
    shared = "_shexp" if config.num_local_experts else ""
    for name, tensor in list(tensors.items()):
        leaf = name.split(".", 2)[-1]
        if leaf == "ssm_conv1d.weight":
            tensors[name] = tensor.squeeze(1)
        elif leaf == "ssm_a":
            tensors[name] = -tensor.exp().unsqueeze(1)
        elif leaf == "ssm_d":
            tensors[name] = tensor.unsqueeze(1)
        elif leaf == "ssm_norm.weight":
            tensors[name] = tensor.view(config.mamba_n_groups, -1)
        elif leaf == "ffn_gate_up.weight":
            del tensors[name]
            for part, rows in zip(("gate", "up"), tensor.chunk(2), strict=True):
                tensors[name.replace("ffn_gate_up", f"ffn_{part}{shared}")] = rows


def further_token(tensors: Tensors, config: Any) -> None:
    """As `delta_written`, with a layer that predicts a further token."""
    delta_written(tensors, config)
    layer = f"blk.{config.num_hidden_layers}"
    for name in ("attn_norm", "nextn.enorm"):
        tensors[f"{layer}.{name}.weight"] = torch.ones(config.hidden_size)
    tensors[f"{layer}.nextn.eh_proj.weight"] = torch.ones(config.hidden_size, 2 * config.hidden_size)


QWEN_EXPERTS = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=64
)  # fmt: skip
NEXT = QWEN_MOE | {path: leaf for path, leaf in DELTA.items() if "in_proj" not in path} | {
    "linear_attn.in_proj_qkvz": "ssm_in", "linear_attn.in_proj_ba": "ssm_ba",
}  # fmt: skip
LFM2 = {
    "operator_norm": "attn_norm", "ffn_norm": "ffn_norm", "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv", "conv.out_proj": "shortconv.out_proj", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm", "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down", "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.expert_bias": "exp_probs_b.bias",
}  # fmt: skip
LFM2_TOP = {"model.embedding_norm": "token_embd_norm"}
LFM2_SIZES = dict(num_hidden_layers=3, layer_types=["conv", "conv", "full_attention"])
LFM2_KEYS = {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 0, 2]}

GRANITE = LAYER | {
    "mamba.in_proj": "ssm_in", "mamba.conv1d": "ssm_conv1d", "mamba.A_log": "ssm_a", "mamba.D": "ssm_d",
    "mamba.dt_bias": "ssm_dt.bias", "mamba.norm": "ssm_norm", "mamba.out_proj": "ssm_out",
    "block_sparse_moe.router": "ffn_gate_inp", "shared_mlp.input_linear": "ffn_gate_up",
}  # fmt: skip
GRANITE_SIZES = dict(
    num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"], mamba_n_heads=8,
    mamba_d_head=16, mamba_d_state=16, mamba_expand=2, embedding_multiplier=3.0, residual_multiplier=0.5,
    attention_multiplier=0.25, logits_scaling=2.0,
)  # fmt: skip
GRANITE_KEYS = {
    "attention.head_count_kv": [0, 2, 0], "rope.scaling.finetuned": False, "ssm.conv_kernel": 4, "ssm.state_size": 16,
    "ssm.time_step_rank": 8, "ssm.inner_size": 128, "embedding_scale": 3.0, "residual_scale": 0.5,
    "attention.scale": 0.25, "logit_scale": 2.0,
}  # fmt: skip

HYBRIDS = {
    "qwen35": Case(
        "qwen35", "qwen3_5_text", LAYER | DELTA, DELTA_SIZES, DELTA_KEYS | SECTIONS, shifted=True,
        written=delta_written,
    ),
    "qwen35 with a head of values for each key": Case(
        "qwen35", "qwen3_5_text", LAYER | DELTA, DELTA_SIZES | {"linear_num_key_heads": 6},
        DELTA_KEYS | SECTIONS | {"ssm.group_count": 6}, shifted=True, written=delta_written,
    ),
    "qwen35 with a layer for a further token": Case(
        "qwen35", "qwen3_5_text", LAYER | DELTA, DELTA_SIZES,
        DELTA_KEYS | SECTIONS | {"block_count": 5, "nextn_predict_layers": 1}, shifted=True, written=further_token,
    ),
    "qwen35 in large blocks": Case(
        "qwen35", "qwen3_5_text", LAYER | DELTA,
        DELTA_SIZES
        | dict(hidden_size=256, intermediate_size=256, head_dim=64)
        | dict(linear_num_value_heads=4, linear_value_head_dim=128),
        DELTA_KEYS | SECTIONS | {"ssm.time_step_rank": 4, "ssm.inner_size": 512}, shifted=True,
        written=delta_written, codes="Q4_K",
    ),
    "qwen35moe": Case(
        "qwen35moe", "qwen3_5_moe_text", QWEN_MOE | DELTA,
        DELTA_SIZES | QWEN_EXPERTS,
        DELTA_KEYS | SECTIONS | EXPERTS | {"expert_feed_forward_length": 32}, shifted=True, written=delta_written,
    ),
    "qwen3next": Case(
        "qwen3next", "qwen3_next", NEXT, DELTA_SIZES | QWEN_EXPERTS,
        DELTA_KEYS | EXPERTS | {"expert_feed_forward_length": 32}, shifted=True, written=next_written,
    ),
    "qwen3next of older files": Case(
        "qwen3next", "qwen3_next", NEXT, DELTA_SIZES | QWEN_EXPERTS,
        DELTA_KEYS | EXPERTS | {"expert_feed_forward_length": 32}, shifted=True, written=former_next_written,
    ),
    "granitehybrid": Case(
        "granitehybrid", "granitemoehybrid", GRANITE | {"shared_mlp.output_linear": "ffn_down"},
        GRANITE_SIZES
        | dict(shared_intermediate_size=96, num_local_experts=0, num_experts_per_tok=0, mamba_n_groups=2),
        GRANITE_KEYS | {"ssm.group_count": 2}, permuted=True, written=mamba_written,
    ),
    "granitehybrid with experts and rotation": Case(
        "granitehybrid", "granitemoehybrid", GRANITE | {"shared_mlp.output_linear": "ffn_down_shexp"},
        GRANITE_SIZES
        | dict(shared_intermediate_size=64, num_local_experts=4, num_experts_per_tok=2, mamba_n_groups=1)
        | dict(position_embedding_type="rope"),
        GRANITE_KEYS | EXPERTS
        | {"ssm.group_count": 1, "expert_shared_feed_forward_length": 64, "rope.scaling.finetuned": True},
        permuted=True, written=mamba_written,
    ),
    "lfm2": Case(
        "lfm2", "lfm2", LFM2, LFM2_SIZES | {"block_auto_adjust_ff_dim": False}, LFM2_KEYS,
        norm="norm_eps", layer_norm=False,
        written=without_middle_axis, top=LFM2_TOP,
    ),
    "lfm2moe": Case(
        "lfm2moe", "lfm2_moe", LFM2,
        LFM2_SIZES | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, num_dense_layers=1),
        LFM2_KEYS | EXPERTS
        | {"expert_feed_forward_length": 32, "leading_dense_block_count": 1, "expert_gating_func": 2},
        norm="norm_eps", layer_norm=False, written=without_middle_axis, top=LFM2_TOP,
    ),
}  # fmt: skip
