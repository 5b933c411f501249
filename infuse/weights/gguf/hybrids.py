"""Configs of models in which some layers keep a state instead of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from infuse.weights.gguf.metadata import Metadata
from infuse.weights.gguf.rotary import partly_rotated
from infuse.weights.gguf.settings import SIGMOID, causal_lm, experts, granite_scales


def _qwen35(meta: Metadata) -> dict[str, Any]:
    return {"model_type": "qwen3_5_text"} | _delta(meta) | causal_lm("Qwen3_5")


def _qwen35moe(meta: Metadata) -> dict[str, Any]:
    own = {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": _shared(meta)}
    return own | _delta(meta) | experts(meta) | causal_lm("Qwen3_5Moe")


def _delta(meta: Metadata) -> dict[str, Any]:
    """What Qwen's models with a gated delta rule have in common."""
    values, heads = meta.get("ssm.inner_size"), meta.get("ssm.time_step_rank")
    if values % heads:
        raise meta.fault("ssm.inner_size", values, f"a multiple of ssm.time_step_rank, {heads}")
    rotated = partly_rotated(meta)
    sections = meta.listed("rope.dimension_sections")
    if sections is not None:
        rotated |= {"mrope_section": sections[:3], "mrope_interleaved": True}
    return {
        "linear_conv_kernel_dim": meta.get("ssm.conv_kernel"),
        "linear_num_key_heads": meta.get("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": meta.get("ssm.state_size"),
        "linear_value_head_dim": values // heads,
        "layer_types": _types(meta, "attn_k.weight", "linear_attention"),
        "rope_parameters": rotated,
        "attention_bias": meta.has_in_a_layer("attn_q.bias"),
    }


def _qwen3next(meta: Metadata) -> dict[str, Any]:
    # llama.cpp runs every file of this architecture with weights that sum to 1.
    own = {"model_type": "qwen3_next", "norm_topk_prob": True, "shared_expert_intermediate_size": _shared(meta)}
    return own | _delta(meta) | experts(meta) | causal_lm("Qwen3Next")


def _shared(meta: Metadata) -> int:
    """The width of the expert that all tokens get."""
    return meta.rows("blk.0.ffn_gate_shexp.weight") or int(meta.get("expert_shared_feed_forward_length"))


def _lfm2(meta: Metadata) -> dict[str, Any]:
    # The width in a file is the one that the model has, not that from which its config computes it.
    return {"block_auto_adjust_ff_dim": False} | _short_convolution(meta) | causal_lm("Lfm2")


def _lfm2moe(meta: Metadata) -> dict[str, Any]:
    if (gate := meta.get("expert_gating_func")) != SIGMOID:
        raise meta.fault("expert_gating_func", gate, f"{SIGMOID}, a sigmoid")
    return (
        {
            "model_type": "lfm2_moe",
            "num_dense_layers": meta.get("leading_dense_block_count"),
            "num_experts": meta.get("expert_count"),
            "num_experts_per_tok": meta.get("expert_used_count"),
            "moe_intermediate_size": meta.get("expert_feed_forward_length"),
            "routed_scaling_factor": meta.get("expert_weights_scale", 0) or 1.0,
            "norm_topk_prob": True,  # in llama.cpp, whatever the file says
            "use_expert_bias": meta.has_in_a_layer("exp_probs_b.bias"),
        }
        | _short_convolution(meta)
        | causal_lm("Lfm2Moe")
    )


def _short_convolution(meta: Metadata) -> dict[str, Any]:
    return {
        "norm_eps": meta.get("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": meta.get("shortconv.l_cache"),
        "conv_bias": meta.has_in_a_layer("shortconv.conv.bias"),
        "layer_types": _types(meta, "attn_k.weight", "conv"),
    }


def _granitehybrid(meta: Metadata) -> dict[str, Any]:
    width, heads = meta.get("ssm.inner_size"), meta.get("ssm.time_step_rank")
    hidden, count = meta.get("embedding_length"), meta.get("expert_count", 0)
    if width % hidden or width % heads:
        raise meta.fault("ssm.inner_size", width, f"a multiple of {hidden}, the hidden size, and of {heads} heads")
    return (
        {
            "model_type": "granitemoehybrid",
            "num_local_experts": count,
            "num_experts_per_tok": meta.get("expert_used_count") if count else 0,
            "intermediate_size": meta.get("expert_feed_forward_length", 0) or meta.get("feed_forward_length"),
            "shared_intermediate_size": meta.get(f"{'expert_shared_' if count else ''}feed_forward_length"),
            # llama.cpp's switch of rotation: off in this family's hybrids.
            "position_embedding_type": "rope" if meta.get("rope.scaling.finetuned", True) else None,
            "mamba_n_heads": heads,
            "mamba_n_groups": meta.get("ssm.group_count"),
            "mamba_d_state": meta.get("ssm.state_size"),
            "mamba_d_head": width // heads,
            "mamba_d_conv": meta.get("ssm.conv_kernel"),
            "mamba_expand": width // hidden,
            "mamba_conv_bias": meta.has_in_a_layer("ssm_conv1d.bias"),
            "mamba_proj_bias": meta.has_in_a_layer("ssm_in.bias"),
            "layer_types": _types(meta, "attn_k.weight", "linear_attention"),
            "attention_bias": meta.has_in_a_layer("attn_q.bias"),
        }
        | granite_scales(meta)
        | causal_lm("GraniteMoeHybrid")
    )


def _types(meta: Metadata, of_attention: str, other: str) -> list[str]:
    """The type of each layer: those with the tensor `of_attention` have attention."""
    layers = range(meta.layers)
    return ["full_attention" if meta.has(f"blk.{number}.{of_attention}") else other for number in layers]


HYBRIDS: Mapping[str, Callable[[Metadata], dict[str, Any]]] = MappingProxyType({
    "qwen35": _qwen35, "qwen35moe": _qwen35moe, "qwen3next": _qwen3next, "lfm2": _lfm2, "lfm2moe": _lfm2moe,
    "granitehybrid": _granitehybrid,
})  # fmt: skip
