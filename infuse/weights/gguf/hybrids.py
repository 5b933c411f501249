"""Configs of models in which some layers keep a state instead of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from infuse.weights.gguf.metadata import Metadata
from infuse.weights.gguf.rotary import partly_rotated
from infuse.weights.gguf.settings import causal_lm, experts


def _qwen35(meta: Metadata) -> dict[str, Any]:
    return {"model_type": "qwen3_5_text"} | _delta(meta) | causal_lm("Qwen3_5")


def _qwen35moe(meta: Metadata) -> dict[str, Any]:
    shared = meta.rows("blk.0.ffn_gate_shexp.weight") or meta.get("expert_shared_feed_forward_length")
    own = {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": shared}
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


def _types(meta: Metadata, of_attention: str, other: str) -> list[str]:
    """The type of each layer: those with the tensor `of_attention` have attention."""
    layers = range(meta.layers)
    return ["full_attention" if meta.has(f"blk.{number}.{of_attention}") else other for number in layers]


HYBRIDS: Mapping[str, Callable[[Metadata], dict[str, Any]]] = MappingProxyType({
    "qwen35": _qwen35, "qwen35moe": _qwen35moe,
})  # fmt: skip
