"""Values of configs that several architectures have."""

from __future__ import annotations

from typing import Any

from infuse.weights.gguf.metadata import PATTERN, Metadata

SOFTMAX, SIGMOID = 1, 2  # in expert_gating_func


def causal_lm(name: str) -> dict[str, Any]:
    """The class of transformers, by the beginning of its name."""
    return {"architectures": [f"{name}ForCausalLM"]}


def granite_scales(meta: Metadata) -> dict[str, Any]:
    """The numbers by which a Granite multiplies. As in llama.cpp, 0 or none is no scale; scores have that of heads."""
    return {
        "embedding_multiplier": meta.get("embedding_scale", 0) or 1.0,
        "residual_multiplier": meta.get("residual_scale", 0) or 1.0,
        "attention_multiplier": meta.get("attention.scale", 0) or meta.head_dim**-0.5,
        "logits_scaling": meta.get("logit_scale", 0) or 1.0,
    }


def layer_types(meta: Metadata) -> dict[str, Any]:
    """Which layers have a window, if the file says it: for each layer, or as the period of those without one."""
    if not meta.stores(PATTERN):
        return {}
    count, each = meta.get("block_count"), meta.of_layers(PATTERN)
    if each is None:
        period = meta.get(PATTERN)
        each = [period == 0 or number % period < period - 1 for number in range(count)]
    return {"layer_types": ["sliding_attention" if one else "full_attention" for one in each]}


def experts(meta: Metadata) -> dict[str, Any]:
    """Numbers and width of experts in all layers, as Qwen's configs call them."""
    width = meta.rows("blk.0.ffn_gate_exps.weight") or meta.get("expert_feed_forward_length")
    return {
        "num_experts": meta.get("expert_count"),
        "num_experts_per_tok": meta.get("expert_used_count"),
        "moe_intermediate_size": width,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
