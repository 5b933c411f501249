"""Cases of families whose layers have attention and, besides experts, nothing of their own."""

from __future__ import annotations

from tests.weights.gguf.cases.case import EXPERTS, GEMMA, LAYER, QWEN_MOE, Case

EXAONE4 = LAYER | {
    "post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
GLM4 = GEMMA | {
    "mlp.gate_up_proj": "ffn_up", "post_self_attn_layernorm": "post_attention_norm",
    "post_attention_layernorm": "ffn_norm", "post_mlp_layernorm": "post_ffw_norm",
}  # fmt: skip
MIXTRAL = LAYER | {"mlp.gate": "ffn_gate_inp"}
YARN = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 32}
PLAIN = {
    "llama": Case("llama", "llama", permuted=True, changes={"attention_bias": True}),
    "mistral": Case("llama", "llama", permuted=True, changes={"tie_word_embeddings": True}),
    "mixtral": Case(
        "llama", "mixtral", MIXTRAL, {"num_local_experts": 4, "num_experts_per_tok": 2}, EXPERTS, permuted=True
    ),
    "granite": Case(
        "granite", "granite", permuted=True,
        changes=dict(embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.25, logits_scaling=2.0),
        keys={"embedding_scale": 3.0, "residual_scale": 0.5, "attention.scale": 0.25, "logit_scale": 2.0},
    ),
    "smollm3": Case("smollm3", "smollm3", permuted=True, changes={"num_hidden_layers": 4}),
    "qwen2": Case("qwen2", "qwen2"),
    "qwen3": Case("qwen3", "qwen3", changes={"head_dim": 32}),
    "qwen3 with yarn": Case(
        "qwen3", "qwen3", changes={"head_dim": 32, "rope_parameters": YARN},
        keys={"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
    ),
    "qwen2moe": Case(
        "qwen2moe", "qwen2_moe", QWEN_MOE,
        dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=64),
        EXPERTS | {"expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 64},
    ),
    "qwen3moe": Case(
        "qwen3moe", "qwen3_moe", QWEN_MOE,
        dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=32, norm_topk_prob=True),
        EXPERTS | {"expert_feed_forward_length": 32},
    ),
    "gemma": Case("gemma", "gemma", shifted=True, changes={"head_dim": 32}),
    "gemma2": Case(
        "gemma2", "gemma2", GEMMA, shifted=True,
        changes=dict(head_dim=32, query_pre_attn_scalar=32, sliding_window=8, attn_logit_softcapping=20.0),
        keys={"attention.sliding_window": 8, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": Case(
        "gemma3", "gemma3_text", GEMMA, shifted=True,
        changes=dict(
            head_dim=32, query_pre_attn_scalar=32, sliding_window=8, num_hidden_layers=6,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
        keys={"attention.sliding_window": 8, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "phi3": Case(
        "phi3", "phi3",
        LAYER | {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
        {"pad_token_id": 0, "original_max_position_embeddings": 128},
    ),
    "ernie4_5": Case("ernie4_5", "ernie4_5", changes={"head_dim": 32, "tie_word_embeddings": True}),
    "exaone4": Case(
        "exaone4", "exaone4", EXAONE4, {"num_hidden_layers": 4, "head_dim": 32, "sliding_window": 8},
        {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, True, True, False]},
    ),
    "exaone4 without windows": Case(
        "exaone4", "exaone4", EXAONE4, {"sliding_window": None, "layer_types": ["full_attention"] * 2}
    ),
    "hunyuan": Case(
        "hunyuan-dense", "hunyuan_v1_dense",
        LAYER | {"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"},
        {"head_dim": 32, "attention_bias": True},
    ),
    "glm4": Case("glm4", "glm4", GLM4, {"head_dim": 32, "attention_bias": True}),
    "olmo2": Case("olmo2", "olmo2", GEMMA),
    "starcoder2": Case(
        "starcoder2", "starcoder2", LAYER | {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}, norm="norm_epsilon"
    ),
    "stablelm": Case("stablelm", "stablelm", changes={"use_qkv_bias": True}, norm="layer_norm_eps"),
    "stablelm with norms of heads": Case(
        "stablelm", "stablelm", changes={"qk_layernorm": True, "use_parallel_residual": True}, norm="layer_norm_eps"
    ),
    "cohere": Case(
        "command-r", "cohere", changes={"logit_scale": 0.25}, keys={"logit_scale": 0.25}, norm="layer_norm_eps"
    ),
    "cohere2": Case(
        "cohere2", "cohere2", changes={"logit_scale": 0.25, "sliding_window": 8}, norm="layer_norm_eps",
        keys={"logit_scale": 0.25, "attention.sliding_window": 8},
    ),
    "nemotron": Case("nemotron", "nemotron", shifted=True, norm="norm_eps"),
    "gpt-oss": Case(
        "gpt-oss", "gpt_oss",
        LAYER | {
            "post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp", "self_attn": "attn_sinks",
        },
        dict(
            num_local_experts=4, num_experts_per_tok=2, intermediate_size=64, head_dim=32, sliding_window=8,
            rope_parameters=YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        ),
        EXPERTS | {
            "attention.sliding_window": 8, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32, "expert_feed_forward_length": 64,
        },
    ),
}  # fmt: skip
