"""Cases of families with latent attention, or with layers without experts before those with them."""

from __future__ import annotations

from typing import Any

from tests.weights.gguf.cases.case import EXPERTS, LAYER, Case, Tensors

SHARED = LAYER | {
    "mlp.gate": "ffn_gate_inp", "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}  # fmt: skip
GLM4_MOE = SHARED | {"post_attention_layernorm": "post_attention_norm"}
ERNIE = SHARED | {"mlp.gate.moe_statics.e_score_correction_bias": "exp_probs_b.bias"}
LATENT = SHARED | {
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
}  # fmt: skip
MIXTURE_SIZES = dict(
    num_hidden_layers=3, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1,
    n_shared_experts=2, routed_scaling_factor=2.5,
)  # fmt: skip
MIXTURE_KEYS = EXPERTS | {
    "expert_feed_forward_length": 32, "expert_shared_count": 2, "leading_dense_block_count": 1,
    "expert_weights_scale": 2.5,
}  # fmt: skip
SIGMOID = {"expert_gating_func": 2, "expert_weights_norm": True}
LATENT_SIZES = MIXTURE_SIZES | dict(
    num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=64
)
LATENT_KEYS = MIXTURE_KEYS | {
    "attention.head_count_kv": 1, "attention.key_length": 48, "attention.value_length": 32,
    "attention.key_length_mla": 48, "attention.value_length_mla": 64, "attention.q_lora_rank": 32,
    "attention.kv_lora_rank": 32,
}  # fmt: skip
WHOLE_KEYS = {key: value for key, value in LATENT_KEYS.items() if "_mla" not in key and "kv" not in key} | {
    "attention.kv_lora_rank": 32, "attention.value_length": 64,
}  # fmt: skip
GROUPS = {"expert_group_count": 2, "expert_group_used_count": 1}
LITE = {key: value for key, value in LATENT_KEYS.items() if "q_lora" not in key}
YARN = dict(
    rope_type="yarn", rope_theta=1e4, factor=40.0, mscale=0.707, mscale_all_dim=0.707,
    original_max_position_embeddings=32,
)  # fmt: skip
YARN_KEYS = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 40.0, "rope.scaling.original_context_length": 32,
    "rope.scaling.yarn_log_multiplier": 0.0707,
}  # fmt: skip


def in_a_row(tensors: Tensors, config: Any) -> None:
    """Biases for the choice of experts without the axis of one entry, as in some files."""
    for name, tensor in tensors.items():
        tensors[name] = tensor.flatten() if name.endswith("exp_probs_b.bias") else tensor


def in_two_parts(tensors: Tensors, config: Any) -> None:
    """What makes keys and values of the latent: keys transposed, and values."""
    for name, tensor in list(tensors.items()):
        if name.endswith("attn_kv_b.weight"):
            del tensors[name]
            heads = tensor.view(config.num_attention_heads, -1, config.kv_lora_rank)
            keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
            tensors[name.replace("kv_b", "k_b")] = keys.transpose(1, 2).contiguous()
            tensors[name.replace("kv_b", "v_b")] = values.contiguous()


def in_both_ways(tensors: Tensors, config: Any) -> None:
    whole = dict(tensors)
    in_two_parts(tensors, config)
    tensors |= whole


MIXTURES = {
    "glm4moe": Case(
        "glm4moe", "glm4_moe", GLM4_MOE,
        MIXTURE_SIZES | dict(head_dim=32, n_group=2, topk_group=1, use_qk_norm=True, attention_bias=True),
        MIXTURE_KEYS | SIGMOID | GROUPS,
    ),
    "ernie4_5-moe": Case(
        "ernie4_5-moe", "ernie4_5_moe", ERNIE,
        dict(
            num_hidden_layers=3, moe_num_experts=4, moe_k=2, moe_intermediate_size=32, moe_num_shared_experts=2,
            moe_layer_start_index=1, moe_layer_end_index=2, tie_word_embeddings=True,
        ),
        EXPERTS | {
            "expert_feed_forward_length": 32, "expert_shared_count": 2, "leading_dense_block_count": 1,
            "interleave_moe_layer_step": 1, "expert_shared_feed_forward_length": 48,
        },
        written=in_a_row,
    ),
    "deepseek2": Case(
        "deepseek2", "deepseek_v3", LATENT, LATENT_SIZES | dict(n_group=2, topk_group=1),
        LATENT_KEYS | SIGMOID | GROUPS, written=in_two_parts,
        dequantized="kv_b_proj",
    ),
    "deepseek2 of older files": Case(
        "deepseek2", "deepseek_v3", LATENT, LATENT_SIZES | dict(n_group=1, topk_group=1), WHOLE_KEYS | SIGMOID,
        dequantized="kv_b_proj",
    ),
    "deepseek2 in both ways": Case(
        "deepseek2", "deepseek_v3", LATENT, LATENT_SIZES | dict(n_group=1, topk_group=1), LATENT_KEYS | SIGMOID,
        written=in_both_ways, dequantized="kv_b_proj",
    ),
    "deepseek2 with a softmax, yarn and plain queries": Case(
        "deepseek2", "deepseek_v2", LATENT,
        LATENT_SIZES
        | dict(q_lora_rank=None, n_group=1, topk_group=1, topk_method="greedy", rope_parameters=YARN, head_dim=16),
        LITE | YARN_KEYS, written=in_two_parts,
        dequantized="kv_b_proj",
    ),
    "deepseek2 with a softmax in groups": Case(
        "deepseek2", "deepseek_v2", LATENT,
        LATENT_SIZES | dict(n_group=2, topk_group=1, topk_method="group_limited_greedy", head_dim=16),
        LATENT_KEYS | GROUPS | {"expert_gating_func": 1}, written=in_two_parts,
        dequantized="kv_b_proj",
    ),
}  # fmt: skip
