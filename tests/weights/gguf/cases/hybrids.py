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


def further_token(tensors: Tensors, config: Any) -> None:
    """As `delta_written`, with a layer that predicts a further token."""
    delta_written(tensors, config)
    layer = f"blk.{config.num_hidden_layers}"
    for name in ("attn_norm", "nextn.enorm"):
        tensors[f"{layer}.{name}.weight"] = torch.ones(config.hidden_size)
    tensors[f"{layer}.nextn.eh_proj.weight"] = torch.ones(config.hidden_size, 2 * config.hidden_size)


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
        DELTA_SIZES
        | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=64),
        DELTA_KEYS | SECTIONS | EXPERTS | {"expert_feed_forward_length": 32}, shifted=True, written=delta_written,
    ),
}  # fmt: skip
