"""Tiny mixtures beside those of families.py, in a table for each way in which they differ from them."""

from __future__ import annotations

from typing import Any

import transformers as t

from tests.models.families import DEEPSEEK_OCR2_TEXT, GLM4V_TEXT, GQA, QWEN3_OMNI_TEXT, QWEN3_VL_TEXT, Family

FOUR_EXPERTS = dict(GQA, num_local_experts=4, num_experts_per_tok=2)
SEQ2SEQ = dict(vocab_size=96, num_experts=4, decoder_start_token_id=2, pad_token_id=0, eos_token_id=1)
NOT_ROUTED = {
    one.name: one
    for one in (
        Family(
            "llama4", t.Llama4TextConfig, t.Llama4ForCausalLM,
            values=dict(
                FOUR_EXPERTS, head_dim=12, intermediate_size=40, intermediate_size_mlp=80, interleave_moe_layer_step=1,
                num_hidden_layers=2,
            ),
        ),
        Family(
            "dbrx", t.DbrxConfig, t.DbrxForCausalLM,
            values=dict(
                d_model=48, n_heads=4, n_layers=2, max_seq_len=128, vocab_size=96,
                attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=1e4),
                ffn_config=dict(hidden_size=48, ffn_hidden_size=40, moe_num_experts=4, moe_top_k=2),
            ),
        ),
        Family(
            "switch", t.SwitchTransformersConfig, t.SwitchTransformersForConditionalGeneration, "seq2seq",
            dict(
                SEQ2SEQ, d_model=48, d_kv=12, d_ff=40, num_heads=4, num_layers=2, num_decoder_layers=2,
                num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, expert_capacity=3,
            ),
        ),
    )
}  # fmt: skip


_QWEN_VISION = dict(
    depth=1,
    hidden_size=32,
    num_heads=2,
    intermediate_size=32,
    out_hidden_size=48,
    num_position_embeddings=16,
    deepstack_visual_indexes=[0],
    patch_size=8,
)


_IDS = dict(vision_start_token_id=90, vision_end_token_id=91, image_token_id=92, video_token_id=93)
SEEING = {
    one.name: one
    for one in (
        Family(
            "qwen3-vl-moe", t.Qwen3VLMoeConfig, t.Qwen3VLMoeForConditionalGeneration,
            values=dict(text_config=QWEN3_VL_TEXT, vision_config=_QWEN_VISION, **_IDS),
        ),
        Family(
            "qwen3-omni-thinker", t.Qwen3OmniMoeThinkerConfig, t.Qwen3OmniMoeThinkerForConditionalGeneration,
            values=dict(
                text_config=QWEN3_OMNI_TEXT, vision_config=_QWEN_VISION,
                audio_config=dict(
                    d_model=32, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=32, num_mel_bins=8,
                    output_dim=48, downsample_hidden_size=8,
                ),
                audio_token_id=94, **_IDS,
            ),
        ),
        Family(
            "glm4v-moe", t.Glm4vMoeConfig, t.Glm4vMoeForConditionalGeneration,
            values=dict(
                text_config=GLM4V_TEXT,
                vision_config=dict(
                    depth=1, hidden_size=32, num_heads=2, intermediate_size=32, out_hidden_size=48, image_size=16,
                    patch_size=4,
                ),
            ),
        ),
        Family(
            "deepseek-ocr2", t.DeepseekOcr2Config, t.DeepseekOcr2ForConditionalGeneration,
            values=dict(
                text_config=DEEPSEEK_OCR2_TEXT, image_token_id=92,
                vision_config=dict(
                    sam_config=dict(
                        hidden_size=32, output_channels=8, num_hidden_layers=1, num_attention_heads=2, image_size=32,
                        patch_size=8, mlp_dim=32, downsample_channels=[8, 32], global_attn_indexes=[0], window_size=2,
                    ),
                    encoder_config=dict(
                        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                        num_key_value_heads=2, vocab_size=8,
                    ),
                ),
            ),
        ),
    )
}  # fmt: skip


NARROW_EXPERTS = dict(GQA, num_experts_per_tok=2, moe_intermediate_size=24)
CONVERTED = {
    one.name: one
    for one in (
        Family(  # text and image experts, which the checkpoint has in one list
            "ernie4_5_vl_moe", t.Ernie4_5_VLMoeConfig, t.Ernie4_5_VLMoeForConditionalGeneration,
            values=dict(
                text_config=dict(
                    GQA, moe_num_experts=4, moe_k=2, moe_intermediate_size=[24, 16], num_hidden_layers=2,
                    mlp_layer_types=["dense", "sparse"],
                    rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 2, 2]),
                ),
                vision_config=dict(depth=1, hidden_size=32, num_heads=2, intermediate_size=32),
            ),
        ),
        Family(
            "step3p7", t.Step3p7Config, t.Step3p7ForConditionalGeneration,
            values=dict(
                text_config=dict(
                    NARROW_EXPERTS, n_routed_experts=4, num_local_experts=4, share_expert_dim=24, head_dim=12,
                    num_hidden_layers=2, mlp_layer_types=["dense", "sparse"],
                    layer_types=["full_attention", "sliding_attention"], sliding_window=5,
                ),
                vision_config=dict(
                    hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28,
                    patch_size=14, max_position_embeddings=4,
                ),
                image_token_id=95,
            ),
        ),
    )
}  # fmt: skip


WIDE_EXPERTS: dict[str, Any] = dict(GQA, num_experts_per_tok=2, moe_intermediate_size=48)
OVER_RANKS = {
    "mixtral": Family("mixtral", t.MixtralConfig, t.MixtralForCausalLM, values=dict(WIDE_EXPERTS, num_local_experts=5)),
    "qwen2_moe": Family(
        "qwen2_moe",
        t.Qwen2MoeConfig,
        t.Qwen2MoeForCausalLM,
        values=dict(WIDE_EXPERTS, num_experts=4, shared_expert_intermediate_size=32),
    ),
    "gpt_oss": Family(
        "gpt_oss", t.GptOssConfig, t.GptOssForCausalLM, values=dict(WIDE_EXPERTS, head_dim=12, num_local_experts=4)
    ),
}
