"""The config of Gemma 4: layers with a window and those without one have heads of other widths and numbers."""

from __future__ import annotations

from typing import Any

from infuse.ground.errors import CheckpointError
from infuse.weights.gguf.metadata import DEFAULT_BASE, Metadata
from infuse.weights.gguf.settings import causal_lm, layer_types

_FREQUENCIES = "rope_freqs.weight"
_NEVER = 1e29  # a frequency that is divided by more is as good as 0


def gemma4(meta: Metadata) -> dict[str, Any]:
    """Values of transformers' config for the text model. Layers without a window override those of the others."""
    types = layer_types(meta)["layer_types"]
    windowed, others = ([i for i, one in enumerate(types) if one == kind] for kind in
                        ("sliding_attention", "full_attention"))  # fmt: skip
    shared, width = meta.get("attention.shared_kv_layers", 0), meta.get("attention.key_length")
    own = [number for number in others if number < meta.layers - shared]
    override = {"head_dim": width, "num_key_value_heads": _kv_heads(meta, others)}
    mlp = meta.get("feed_forward_length", layers=[0])
    return (
        {
            "model_type": "gemma4_text",
            "layer_types": types,
            "head_dim": meta.get("attention.key_length_swa"),
            "num_key_value_heads": _kv_heads(meta, windowed),
            "per_layer_config": {number: dict(override) for number in others},
            "intermediate_size": mlp,
            "use_double_wide_mlp": meta.get("feed_forward_length", layers=[meta.layers - 1]) == 2 * mlp,
            "num_kv_shared_layers": shared,
            "attention_k_eq_v": any(not meta.has(f"blk.{number}.attn_v.weight") for number in own),
            "sliding_window": meta.get("attention.sliding_window"),
            "final_logit_softcapping": meta.get("final_logit_softcapping", 0) or None,
            "hidden_size_per_layer_input": meta.get("embedding_length_per_layer_input"),
            "vocab_size_per_layer_input": meta.rows("per_layer_token_embd.weight") or meta.rows("token_embd.weight"),
            "rope_parameters": _rotation(meta, width),
        }
        | _experts(meta)
        | causal_lm("Gemma4")
    )


def _kv_heads(meta: Metadata, layers: list[int]) -> int:
    return int(meta.get("attention.head_count_kv", meta.get("attention.head_count"), layers))


def _experts(meta: Metadata) -> dict[str, Any]:
    count = meta.get("expert_count", 0)
    if not count:
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": meta.get("expert_used_count"),
        "moe_intermediate_size": meta.get("expert_feed_forward_length"),
    }


def _rotation(meta: Metadata, width: int) -> dict[str, Any]:
    """Layers without a window rotate the first pairs of a head, whose factors are 1; those of the others are huge."""
    windowed = meta.get("attention.key_length_swa")
    if (rotated := meta.get("rope.dimension_count_swa", windowed)) != windowed:
        raise meta.fault("rope.dimension_count_swa", rotated, f"{windowed}, the width of a head")
    pairs = width // 2
    for file in meta.files:
        if _FREQUENCIES in file.stored:
            factors = file.read(_FREQUENCIES)
            pairs = int((factors == 1).sum())
            if factors.shape != (width // 2,) or bool((factors[:pairs] != 1).any() or (factors[pairs:] < _NEVER).any()):
                told = f"{tuple(factors.shape)} are not {width // 2} factors, first 1 and then above {_NEVER}"
                raise CheckpointError(f"{file.path}: {_FREQUENCIES}: {told}")
    local = {"rope_type": "default", "rope_theta": meta.get("rope.freq_base_swa")}
    base = meta.get("rope.freq_base", DEFAULT_BASE)
    whole = {"rope_type": "proportional", "rope_theta": base, "partial_rotary_factor": 2 * pairs / width}
    return {"full_attention": whole, "sliding_attention": local}
