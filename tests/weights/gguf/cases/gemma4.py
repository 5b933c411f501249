"""Cases of Gemma 4: heads of two widths, keys and values that layers share, inputs of each layer, experts."""

from __future__ import annotations

from typing import Any

import torch

from tests.weights.gguf.cases.case import EXPERTS, GEMMA, Case, Tensors

LAYER = GEMMA | {
    "layer_scalar": "layer_output_scale.weight", "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm", "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2", "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "router.proj": "ffn_gate_inp", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}  # fmt: skip
TOP = {
    "model.embed_tokens_per_layer": "per_layer_token_embd", "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}  # fmt: skip
WINDOWS = {
    "attention.sliding_window": 8, "attention.key_length": 64, "attention.value_length": 64,
    "attention.key_length_swa": 32, "attention.value_length_swa": 32, "rope.dimension_count": 64,
    "rope.dimension_count_swa": 32, "rope.freq_base_swa": 1e4, "embedding_length_per_layer_input": 0,
}  # fmt: skip


def rotation_written(tensors: Tensors, config: Any) -> None:
    """Layers without a window rotate a quarter of a head's pairs."""
    tensors["rope_freqs.weight"] = torch.tensor([1.0] * 8 + [1e30] * 24)


def experts_written(tensors: Tensors, config: Any) -> None:
    rotation_written(tensors, config)
    for number in range(config.num_hidden_layers):
        halves = [tensors.pop(f"blk.{number}.ffn_{part}_exps.weight") for part in ("gate", "up")]
        tensors[f"blk.{number}.ffn_gate_up_exps.weight"] = torch.cat(halves, dim=1)


def of_others(count: int, **values: int) -> dict[int, dict[str, int]]:
    """What layers without a window, every second one, have otherwise."""
    return dict.fromkeys(range(1, count, 2), values)


def types(count: int) -> list[str]:
    return ["sliding_attention", "full_attention"] * (count // 2)


GEMMA4 = {
    "gemma4": Case(
        "gemma4", "gemma4_text", LAYER,
        dict(
            num_hidden_layers=6, layer_types=types(6), head_dim=32, sliding_window=8, num_kv_shared_layers=2,
            per_layer_config=of_others(6, head_dim=64, num_key_value_heads=2), use_double_wide_mlp=True,
            hidden_size_per_layer_input=32, vocab_size_per_layer_input=64, tie_word_embeddings=True,
            final_logit_softcapping=30.0,
        ),
        WINDOWS | {
            "attention.sliding_window_pattern": [True, False] * 3, "attention.shared_kv_layers": 2,
            "feed_forward_length": [96] * 4 + [192] * 2, "embedding_length_per_layer_input": 32,
            "final_logit_softcapping": 30.0,
        },
        written=rotation_written, top=TOP, dequantized="embed_tokens_per_layer",
    ),
    "gemma4 with experts": Case(
        "gemma4", "gemma4_text", LAYER,
        dict(
            num_hidden_layers=4, layer_types=types(4), head_dim=32, sliding_window=8, attention_k_eq_v=True,
            per_layer_config=of_others(4, head_dim=64, num_key_value_heads=1), hidden_size_per_layer_input=0,
            enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32,
        ),
        WINDOWS | EXPERTS | {
            "attention.sliding_window_pattern": [True, False] * 2, "attention.head_count_kv": [2, 1] * 2,
            "expert_feed_forward_length": 32,
        },
        written=experts_written, top=TOP,
    ),
}  # fmt: skip
