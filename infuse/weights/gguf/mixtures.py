"""Configs of models with routed and shared experts whose first layers have none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from infuse.weights.gguf.metadata import Metadata
from infuse.weights.gguf.rotary import partly_rotated, rotation
from infuse.weights.gguf.settings import SIGMOID, SOFTMAX, causal_lm

_BIAS = "exp_probs_b.bias"
_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"


def _glm4moe(meta: Metadata) -> dict[str, Any]:
    _gate(meta, (SIGMOID,), SIGMOID)
    return (
        {
            "model_type": "glm4_moe",
            "use_qk_norm": meta.has_in_a_layer("attn_q_norm.weight"),
            "attention_bias": meta.has_in_a_layer("attn_q.bias"),
            "rope_parameters": partly_rotated(meta),
            "norm_topk_prob": meta.get("expert_weights_norm", False),
        }
        | _experts(meta)
        | causal_lm("Glm4Moe")
    )


def _deepseek2(meta: Metadata) -> dict[str, Any]:
    biased = meta.has_in_a_layer(_BIAS)
    gate = _gate(meta, (SIGMOID,) if biased else (SIGMOID, SOFTMAX), SIGMOID if biased else SOFTMAX)
    latent = _latent(meta)
    normed = meta.get("expert_weights_norm", False)
    if gate == SIGMOID or not meta.get("expert_count", 0):
        own = {"model_type": "deepseek_v3", "norm_topk_prob": normed, "rope_interleave": True}
        return own | latent | _experts(meta) | causal_lm("DeepseekV3")
    if normed:
        raise meta.fault("expert_weights_norm", normed, f"false, or expert_gating_func {SIGMOID}, a sigmoid")
    shared = _experts(meta)
    method = "greedy" if shared["n_group"] == 1 else "group_limited_greedy"
    return {"model_type": "deepseek_v2", "topk_method": method} | latent | shared | causal_lm("DeepseekV2")


def _ernie4_5_moe(meta: Metadata) -> dict[str, Any]:
    _gate(meta, (SOFTMAX,), SOFTMAX)
    return {
        "model_type": "ernie4_5_moe",
        "use_bias": meta.has("blk.0.attn_q.bias"),
        "moe_num_experts": meta.get("expert_count"),
        "moe_k": meta.get("expert_used_count"),
        "moe_num_shared_experts": _shared(meta),
        "moe_intermediate_size": meta.get("expert_feed_forward_length"),
        "moe_layer_start_index": meta.get("leading_dense_block_count"),
        "moe_layer_end_index": meta.layers - 1,
        "moe_layer_interval": meta.get("interleave_moe_layer_step"),
    } | causal_lm("Ernie4_5_Moe")


def _latent(meta: Metadata) -> dict[str, Any]:
    """Widths of latent attention: files name those of plain keys and values, and newer ones also those of latents."""
    key = meta.get("attention.key_length_mla", 0) or meta.get("attention.key_length")
    value = meta.get("attention.value_length_mla", 0) or meta.get("attention.value_length")
    rotated = meta.get("rope.dimension_count")
    if rotated >= key:
        raise meta.fault("rope.dimension_count", rotated, f"less than {key}, the width of a head's keys")
    parameters = rotation(meta)
    if parameters["rope_type"] == "yarn" and (multiplier := meta.get(_LOG_MULTIPLIER, 0.0)):
        # The converter multiplied by 0.1 in float32; llama.cpp takes both multipliers of the config for one.
        parameters = {name: one for name, one in parameters.items() if name != "attention_factor"}
        parameters["mscale"] = parameters["mscale_all_dim"] = round(multiplier * 10, 6)
    return {
        "num_key_value_heads": meta.get("attention.head_count"),
        "head_dim": rotated,
        "q_lora_rank": _query_rank(meta),
        "kv_lora_rank": meta.get("attention.kv_lora_rank"),
        "qk_nope_head_dim": key - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value,
        "rope_parameters": parameters,
        "attention_bias": meta.has_in_a_layer("attn_kv_a_mqa.bias"),
    }


def _query_rank(meta: Metadata) -> int | None:
    """The width of the latent that queries are made of; None if they are made of the hidden state, as tensors show."""
    if meta.has_in_a_layer("attn_q_a.weight"):
        return int(meta.get("attention.q_lora_rank"))
    return meta.get("attention.q_lora_rank", 0) or None


def _shared(meta: Metadata) -> int:
    """The number of experts that all tokens get, which are one in the file."""
    if meta.has_in_a_layer("ffn_up_shexp.weight"):
        return int(meta.get("expert_shared_count"))
    return int(meta.get("expert_shared_count", 0))


def _experts(meta: Metadata) -> dict[str, Any]:
    """Numbers and width of experts, as DeepSeek's configs call them."""
    count = meta.get("expert_count", 0) or None
    return {
        "n_routed_experts": count,
        "num_experts_per_tok": None if count is None else meta.get("expert_used_count"),
        "n_shared_experts": _shared(meta),
        "moe_intermediate_size": meta.get("expert_feed_forward_length"),
        "first_k_dense_replace": meta.get("leading_dense_block_count", 0),
        "n_group": meta.get("expert_group_count", 0) or 1,
        "topk_group": meta.get("expert_group_used_count", 0) or 1,
        "routed_scaling_factor": meta.get("expert_weights_scale", 0.0) or 1.0,
    }


def _gate(meta: Metadata, possible: tuple[int, ...], default: int) -> int:
    """The function that makes weights of the router's logits."""
    gate: int = meta.get("expert_gating_func", 0) or default
    if gate not in possible:
        names = {SOFTMAX: "softmax", SIGMOID: "sigmoid"}
        raise meta.fault("expert_gating_func", gate, " or ".join(f"{one}, {names[one]}" for one in possible))
    return gate


MIXTURES: Mapping[str, Callable[[Metadata], dict[str, Any]]] = MappingProxyType({
    "glm4moe": _glm4moe, "deepseek2": _deepseek2, "ernie4_5-moe": _ernie4_5_moe,
})  # fmt: skip
