"""The case list: one tiny random model for each family and form. A family is added by adding a row.

Weights are larger than transformers' initialisation makes them, so that positions and masks matter to the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers


class _Library:
    """transformers, with None for the classes that this version does not have: their families are left out."""

    def __getattr__(self, name: str) -> Any:
        return getattr(transformers, name, None)


t = _Library()
SMALL = dict(
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=80,
    vocab_size=96,
    max_position_embeddings=128,
)
GQA = dict(SMALL, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
GPT = dict(
    n_embd=48, n_layer=3, n_head=4, vocab_size=96, n_positions=128, bos_token_id=1, eos_token_id=2, pad_token_id=0
)
ENCODER = dict(SMALL, pad_token_id=0)


@dataclass(frozen=True)
class Family:
    """`kind`: "decoder" generates, "text" and "encoder" read text, "vision" reads pixels, "both" reads both."""

    name: str
    config: type
    model: type
    kind: str = "decoder"
    values: dict[str, Any] = field(default_factory=dict)

    def make(self, seed: int = 0, **changes: Any) -> torch.nn.Module:
        """The model in float32, evaluating, with weights from `seed`."""
        torch.manual_seed(seed)
        model = self.model(self.config(**{**self.values, **changes})).eval()
        enlarge(model)
        if self.kind == "decoder":
            model.generation_config.eos_token_id = None  # run to max_new_tokens
            model.generation_config.pad_token_id = 0
        return model

    @property
    def is_there(self) -> bool:
        return self.config is not None and self.model is not None

    @property
    def vocabulary(self) -> int:
        return 96


def enlarge(model: torch.nn.Module) -> None:
    """Weights of a size at which attention is far from uniform; biases and norms away from 0 and 1."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() >= 2 and "embed" not in name and "wte" not in name:
                p.copy_(torch.randn(p.shape, generator=generator) * 1.2 / p.shape[-1] ** 0.5)
            elif p.dim() == 1:
                p.add_(torch.randn(p.shape, generator=generator) * 0.1)
        saved = model.state_dict().keys()
        for name, buffer in model.named_buffers():
            if name in saved and buffer.is_floating_point() and buffer.numel() == 1:  # a factor of Gemma 4's layers
                buffer.mul_(0.8 + 0.4 * torch.rand(1, generator=generator).item())
        for module in model.modules():  # Gemma 4 divides no scores: its norm of queries learned to
            if getattr(module, "scaling", None) == 1.0 and isinstance(getattr(module, "q_norm", None), torch.nn.Module):
                module.q_norm.weight.mul_(1.5 / module.q_norm.weight.shape[-1] ** 0.5)


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **more}


_LONG = dict(short_factor=[1.0] * 6, long_factor=[2.0] * 6, original_max_position_embeddings=64)
_ROPES = {
    "linear": _rope("linear", factor=2.0),
    "dynamic": _rope("dynamic", factor=2.0, original_max_position_embeddings=128),
    "yarn": _rope("yarn", factor=2.0, original_max_position_embeddings=64),
    "longrope": _rope("longrope", factor=2.0, **_LONG),
    "llama3": _rope(
        "llama3", factor=2.0, original_max_position_embeddings=64, low_freq_factor=1.0, high_freq_factor=4.0
    ),
}
_CLIP_VISION = dict(
    hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8
)
_CLIP_TEXT = dict(ENCODER, num_hidden_layers=2, eos_token_id=2, bos_token_id=1, projection_dim=32)

_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=0.8)
# Copied, because configs write into it.
_GROWING = dict(_YARN, factor=32.0, original_max_position_embeddings=4, llama_4_scaling_beta=0.3)
LLAMA = [
    Family("llama", t.LlamaConfig, t.LlamaForCausalLM, values=GQA),
    Family("llama-bias", t.LlamaConfig, t.LlamaForCausalLM,
           values=dict(GQA, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    *[Family(f"llama-{kind}", t.LlamaConfig, t.LlamaForCausalLM, values=dict(GQA, rope_parameters=rope))
      for kind, rope in _ROPES.items()],
    Family("mistral", t.MistralConfig, t.MistralForCausalLM, values=dict(GQA, sliding_window=5)),
    Family("ministral3", t.Ministral3Config, t.Ministral3ForCausalLM, values=dict(GQA, rope_parameters=dict(_GROWING))),
    Family("ministral3-far", t.Ministral3Config, t.Ministral3ForCausalLM,
           values=dict(GQA, rope_parameters=dict(_GROWING, original_max_position_embeddings=64))),
    Family("qwen2", t.Qwen2Config, t.Qwen2ForCausalLM, values=GQA),
    Family("qwen2-window", t.Qwen2Config, t.Qwen2ForCausalLM,
           values=dict(GQA, use_sliding_window=True, sliding_window=5, max_window_layers=1)),
    Family("bitnet", t.BitNetConfig, t.BitNetForCausalLM, values=GQA),
    Family("qwen3", t.Qwen3Config, t.Qwen3ForCausalLM, values=dict(GQA, head_dim=16)),
    Family("phi3", t.Phi3Config, t.Phi3ForCausalLM, values=GQA),
    Family("gemma", t.GemmaConfig, t.GemmaForCausalLM, values=dict(GQA, head_dim=16)),
    Family("gemma2", t.Gemma2Config, t.Gemma2ForCausalLM,
           values=dict(GQA, head_dim=16, sliding_window=5, query_pre_attn_scalar=20)),
    Family("gemma3", t.Gemma3TextConfig, t.Gemma3ForCausalLM,
           values=dict(GQA, head_dim=16, sliding_window=5, sliding_window_pattern=2)),
    Family("granite", t.GraniteConfig, t.GraniteForCausalLM,
           values=dict(GQA, attention_multiplier=0.4, residual_multiplier=0.6)),
    Family("granite-swa", t.GraniteSWAConfig, t.GraniteSWAForCausalLM,
           values=dict(GQA, attention_multiplier=0.4, residual_multiplier=1.0, sliding_window=5,
                       layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                       layer_rope_theta=[10000.0, 0.0, 500.0])),
    Family("olmo2", t.Olmo2Config, t.Olmo2ForCausalLM, values=GQA),
    Family("stablelm", t.StableLmConfig, t.StableLmForCausalLM, values=dict(GQA, hidden_size=64)),
    Family("stablelm-parallel", t.StableLmConfig, t.StableLmForCausalLM,
           values=dict(GQA, hidden_size=64, use_parallel_residual=True, qk_layernorm=True)),
    Family("smollm3", t.SmolLM3Config, t.SmolLM3ForCausalLM, values=dict(GQA, no_rope_layers=[1, 0, 1])),
    Family("starcoder2", t.Starcoder2Config, t.Starcoder2ForCausalLM, values=dict(GQA, sliding_window=6)),
    Family("cohere", t.CohereConfig, t.CohereForCausalLM, values=GQA),
    Family("cohere-qk", t.CohereConfig, t.CohereForCausalLM, values=dict(GQA, use_qk_norm=True)),
    Family("nemotron", t.NemotronConfig, t.NemotronForCausalLM, values=dict(GQA, head_dim=12)),
    Family("phi", t.PhiConfig, t.PhiForCausalLM, values=GQA),
    Family("phi-qk", t.PhiConfig, t.PhiForCausalLM, values=dict(GQA, qk_layernorm=True)),
]  # fmt: skip
_FALCON = dict(
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    vocab_size=96,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
_MOE = dict(GQA, num_experts_per_tok=2, moe_intermediate_size=40)
_LAGUNA = dict(
    _MOE,
    num_experts=6,
    head_dim=12,
    shared_expert_intermediate_size=24,
    sliding_window=5,
    moe_routed_scaling_factor=1.5,
)
_COHERE2_MOE = dict(
    GQA,
    num_experts=4,
    num_experts_per_tok=2,
    head_dim=12,
    num_shared_experts=1,
    sliding_window=5,
    sliding_window_pattern=2,
    first_k_dense_replace=1,
    prefix_dense_intermediate_size=40,
)
_MROPE = dict(head_dim=12, rope_parameters=_rope("default", mrope_section=[2, 2, 2]))
QWEN3_VL_TEXT = dict(_MOE, num_experts=6, **_MROPE)
QWEN3_OMNI_TEXT = dict(_MOE, num_experts=6, norm_topk_prob=False, **_MROPE)
GLM4V_TEXT = dict(
    _MOE,
    n_routed_experts=8,
    n_shared_experts=1,
    first_k_dense_replace=1,
    n_group=2,
    topk_group=1,
    head_dim=12,
    rope_parameters=_rope("default", partial_rotary_factor=0.5, mrope_section=[1, 1, 1]),
)
DEEPSEEK_OCR2_TEXT = dict(
    _MOE,
    n_routed_experts=8,
    n_shared_experts=1,
    n_group=4,
    topk_group=2,
    topk_method="group_limited_greedy",
    routed_scaling_factor=1.5,
    mlp_layer_types=["dense", "sparse", "sparse"],
)
_LATENT = dict(
    SMALL, num_key_value_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2, q_lora_rank=16, kv_lora_rank=24,
    qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=12,
)  # fmt: skip
_LATENT_MOE: dict[str, Any] = dict(
    _LATENT, moe_intermediate_size=40, n_routed_experts=8, num_local_experts=8, n_shared_experts=1,
    num_experts_per_tok=3, n_group=4, topk_group=2, first_k_dense_replace=1, routed_scaling_factor=1.5,
)  # fmt: skip
_SPARSE_AT_END = dict(mlp_layer_types=["dense", "sparse", "sparse"])
LATENT_MIXTURES = [
    Family("deepseek-v3", t.DeepseekV3Config, t.DeepseekV3ForCausalLM, values=_LATENT_MOE),
    Family(
        "deepseek-v3-yarn",
        t.DeepseekV3Config,
        t.DeepseekV3ForCausalLM,
        values=dict(_LATENT_MOE, rope_parameters=_YARN, q_lora_rank=None, rope_interleave=False),
    ),
    Family(
        "deepseek-v2",
        t.DeepseekV2Config,
        t.DeepseekV2ForCausalLM,
        values=dict(_LATENT_MOE, topk_method="group_limited_greedy", rope_parameters=_YARN),
    ),
    Family(
        "deepseek-v2-lite",
        t.DeepseekV2Config,
        t.DeepseekV2ForCausalLM,
        values=dict(_LATENT_MOE, q_lora_rank=None, n_group=None, topk_group=None, attention_bias=True),
    ),
    Family("glm4-moe-lite", t.Glm4MoeLiteConfig, t.Glm4MoeLiteForCausalLM, values=dict(_LATENT_MOE, **_SPARSE_AT_END)),
    Family("axk1", t.AXK1Config, t.AXK1ForCausalLM, values=dict(_LATENT_MOE, **_SPARSE_AT_END)),
    Family(
        "mistral4", t.Mistral4Config, t.Mistral4ForCausalLM, values=dict(_LATENT_MOE, rope_parameters=dict(_GROWING))
    ),
]
LLAMA4_TEXT = dict(
    GQA, head_dim=12, intermediate_size=40, intermediate_size_mlp=80, num_local_experts=4, num_experts_per_tok=2,
    num_hidden_layers=4, attention_chunk_size=6, no_rope_layers=[1, 1, 0, 1], moe_layers=[1, 2], floor_scale=3,
    attn_scale=0.8,
)  # fmt: skip
# Dense layers beside mixtures, chunks; queries of layers that do not rotate grow from the third token on.
LLAMA4 = [
    Family("llama4", t.Llama4TextConfig, t.Llama4ForCausalLM, values=LLAMA4_TEXT),
    Family("llama4-experts", t.Llama4TextConfig, t.Llama4ForCausalLM,
           values=dict(LLAMA4_TEXT, moe_layers=None, num_experts_per_tok=1, rope_parameters=dict(_ROPES["llama3"]))),
    Family("llama4-plain", t.Llama4TextConfig, t.Llama4ForCausalLM,
           values=dict(LLAMA4_TEXT, use_qk_norm=False, num_experts_per_tok=1, attention_bias=True)),
    Family("llama4-even", t.Llama4TextConfig, t.Llama4ForCausalLM,
           values=dict(LLAMA4_TEXT, attn_temperature_tuning=False, attention_chunk_size=None,
                       no_rope_layers=[0, 1, 1, 0])),
]  # fmt: skip
MIXTURES = [
    Family(
        "mixtral",
        t.MixtralConfig,
        t.MixtralForCausalLM,
        values=dict(GQA, num_local_experts=4, num_experts_per_tok=2, sliding_window=5),
    ),
    Family(
        "qwen3-moe",
        t.Qwen3MoeConfig,
        t.Qwen3MoeForCausalLM,
        values=dict(_MOE, num_experts=6, head_dim=16, mlp_only_layers=[1], norm_topk_prob=True),
    ),
    Family(
        "qwen2-moe",
        t.Qwen2MoeConfig,
        t.Qwen2MoeForCausalLM,
        values=dict(_MOE, num_experts=6, shared_expert_intermediate_size=56, decoder_sparse_step=1),
    ),
    Family("olmoe", t.OlmoeConfig, t.OlmoeForCausalLM, values=dict(GQA, num_experts=6, num_experts_per_tok=3)),
    Family(
        "olmoe-clip",
        t.OlmoeConfig,
        t.OlmoeForCausalLM,
        values=dict(GQA, num_experts=6, num_experts_per_tok=3, clip_qkv=0.8),
    ),
    Family(
        "flex-olmo", t.FlexOlmoConfig, t.FlexOlmoForCausalLM, values=dict(GQA, num_experts=4, num_experts_per_tok=2)
    ),
    Family(
        "glm4-moe",
        t.Glm4MoeConfig,
        t.Glm4MoeForCausalLM,
        values=dict(
            _MOE,
            n_routed_experts=8,
            n_shared_experts=1,
            first_k_dense_replace=1,
            n_group=4,
            topk_group=2,
            head_dim=12,
            use_qk_norm=True,
            routed_scaling_factor=1.5,
        ),
    ),
    Family(
        "dots1",
        t.Dots1Config,
        t.Dots1ForCausalLM,
        values=dict(
            _MOE,
            n_routed_experts=8,
            n_shared_experts=2,
            first_k_dense_replace=1,
            n_group=2,
            topk_group=1,
            head_dim=12,
            norm_topk_prob=True,
        ),
    ),
    Family(
        "granite-moe",
        t.GraniteMoeConfig,
        t.GraniteMoeForCausalLM,
        values=dict(GQA, num_local_experts=4, num_experts_per_tok=2, attention_multiplier=0.4, residual_multiplier=0.6),
    ),
    Family(
        "granite-moe-shared",
        t.GraniteMoeSharedConfig,
        t.GraniteMoeSharedForCausalLM,
        values=dict(GQA, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=40),
    ),
    Family(
        "granite-moe-swa",
        t.GraniteMoeSWAConfig,
        t.GraniteMoeSWAForCausalLM,
        values=dict(
            GQA,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=40,
            residual_multiplier=0.6,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            layer_rope_theta=[10000.0, 0.0, 10000.0],
        ),
    ),
    Family(
        "gpt-oss",
        t.GptOssConfig,
        t.GptOssForCausalLM,
        values=dict(GQA, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=5),
    ),
    Family(
        "flint",
        t.FlintConfig,
        t.FlintForCausalLM,
        values=dict(
            _MOE,
            num_experts=6,
            shared_expert_intermediate_size=56,
            mlp_only_layers=[1],
            head_dim=12,
            norm_topk_prob=True,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    Family("phimoe", t.PhimoeConfig, t.PhimoeForCausalLM, values=dict(GQA, num_local_experts=4, num_experts_per_tok=2)),
    Family(
        "ernie4_5-moe",
        t.Ernie4_5_MoeConfig,
        t.Ernie4_5_MoeForCausalLM,
        values=dict(GQA, moe_num_experts=6, moe_k=2, moe_intermediate_size=40, moe_num_shared_experts=1, use_bias=True),
    ),
    Family(
        "hunyuan-moe",
        t.HunYuanMoEV1Config,
        t.HunYuanMoEV1ForCausalLM,
        values=dict(GQA, num_experts=4, moe_topk=2, head_dim=12),
    ),
    Family(
        "minimax-m2",
        t.MiniMaxM2Config,
        t.MiniMaxM2ForCausalLM,
        values=dict(GQA, head_dim=12, num_local_experts=4, num_experts_per_tok=2),
    ),
    Family(
        "mellum", t.MellumConfig, t.MellumForCausalLM, values=dict(_MOE, num_experts=4, head_dim=12, sliding_window=5)
    ),
    Family(
        "solar-open",
        t.SolarOpenConfig,
        t.SolarOpenForCausalLM,
        values=dict(_MOE, n_routed_experts=4, n_shared_experts=1, head_dim=12, n_group=1, topk_group=1),
    ),
    Family(
        "hy-v3",
        t.HYV3Config,
        t.HYV3ForCausalLM,
        values=dict(_MOE, num_experts=4, num_shared_experts=1, head_dim=12, first_k_dense_replace=1),
    ),
    Family(
        "exaone-moe",
        t.ExaoneMoeConfig,
        t.ExaoneMoeForCausalLM,
        values=dict(_MOE, num_experts=6, num_shared_experts=1, sliding_window=5, sliding_window_pattern=2),
    ),
    Family(
        "kolibri1",
        t.Kolibri1Config,
        t.Kolibri1ForCausalLM,
        values=dict(
            _MOE,
            num_experts=6,
            head_dim=12,
            shared_expert_intermediate_size=24,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    Family(
        "afmoe",
        t.AfmoeConfig,
        t.AfmoeForCausalLM,
        values=dict(
            _MOE,
            num_experts=6,
            head_dim=16,
            num_shared_experts=1,
            sliding_window=5,
            global_attn_every_n_layers=2,
            route_scale=1.5,
        ),
    ),
    Family(
        "laguna",
        t.LagunaConfig,
        t.LagunaForCausalLM,
        values=dict(
            _LAGUNA,
            num_attention_heads_per_layer=[4, 6, 4],
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            moe_router_logit_softcapping=2.0,
        ),
    ),
    Family("laguna-channels", t.LagunaConfig, t.LagunaForCausalLM, values=dict(_LAGUNA, gating="per-channel")),
    Family("cohere2-moe", t.Cohere2MoeConfig, t.Cohere2MoeForCausalLM, values=_COHERE2_MOE),
    Family(
        "cohere2-moe-rms",
        t.Cohere2MoeConfig,
        t.Cohere2MoeForCausalLM,
        values=dict(
            _COHERE2_MOE, rms_norm_eps=1e-5, expert_selection_fn="sigmoid", shared_expert_combination_strategy="sum"
        ),
    ),
    Family(
        "aria-text",
        t.AriaTextConfig,
        t.AriaTextForCausalLM,
        values=dict(GQA, moe_num_experts=6, moe_topk=2, moe_num_shared_experts=1),
    ),
    # Text models of what also sees or hears, without their heads: the whole models are in test_mixtures_that_see.py.
    Family("qwen3-vl-moe", t.Qwen3VLMoeTextConfig, t.Qwen3VLMoeTextModel, "encoder", QWEN3_VL_TEXT),
    Family("qwen3-omni", t.Qwen3OmniMoeTextConfig, t.Qwen3OmniMoeThinkerTextModel, "encoder", QWEN3_OMNI_TEXT),
    Family("glm4v-moe", t.Glm4vMoeTextConfig, t.Glm4vMoeTextModel, "encoder", GLM4V_TEXT),
    Family("deepseek-ocr2", t.DeepseekOcr2TextConfig, t.DeepseekOcr2TextModel, "encoder", DEEPSEEK_OCR2_TEXT),
    *LATENT_MIXTURES,
    *LLAMA4,
]
LATENT = [
    Family("youtu", t.YoutuConfig, t.YoutuForCausalLM, values=_LATENT),
    Family("minicpm3", t.MiniCPM3Config, t.MiniCPM3ForCausalLM, values=_LATENT),
]  # fmt: skip
GPT_LINEAGE = [
    Family("gpt2", t.GPT2Config, t.GPT2LMHeadModel, values=GPT),
    Family("gpt2-inverse", t.GPT2Config, t.GPT2LMHeadModel, values=dict(GPT, scale_attn_by_inverse_layer_idx=True)),
    Family("bigcode", t.GPTBigCodeConfig, t.GPTBigCodeForCausalLM, values=GPT),
    Family("bigcode-heads", t.GPTBigCodeConfig, t.GPTBigCodeForCausalLM, values=dict(GPT, multi_query=False)),
    Family(
        "gpt-neo",
        t.GPTNeoConfig,
        t.GPTNeoForCausalLM,
        values=dict(
            hidden_size=48,
            num_layers=4,
            num_heads=4,
            attention_types=[[["global", "local"], 2]],
            window_size=4,
            vocab_size=96,
            max_position_embeddings=128,
            bos_token_id=1,
            eos_token_id=2,
        ),
    ),
    Family("gptj", t.GPTJConfig, t.GPTJForCausalLM, values=dict(GPT, rotary_dim=8)),
    Family("codegen", t.CodeGenConfig, t.CodeGenForCausalLM, values=dict(GPT, rotary_dim=8, n_ctx=128)),
    Family("gpt-neox", t.GPTNeoXConfig, t.GPTNeoXForCausalLM, values=dict(SMALL, rotary_pct=0.5)),
    Family("gpt-neox-serial", t.GPTNeoXConfig, t.GPTNeoXForCausalLM, values=dict(SMALL, use_parallel_residual=False)),
    Family(
        "opt", t.OPTConfig, t.OPTForCausalLM, values=dict(SMALL, ffn_dim=80, word_embed_proj_dim=48, pad_token_id=0)
    ),
    Family(
        "opt-350m",
        t.OPTConfig,
        t.OPTForCausalLM,
        values=dict(SMALL, ffn_dim=80, word_embed_proj_dim=32, do_layer_norm_before=False, pad_token_id=0),
    ),
    Family("bloom", t.BloomConfig, t.BloomForCausalLM, values=dict(hidden_size=48, n_layer=3, n_head=4, vocab_size=96)),
    Family(
        "falcon-7b",
        t.FalconConfig,
        t.FalconForCausalLM,
        values=dict(_FALCON, alibi=False, multi_query=True, parallel_attn=True),
    ),
    Family(
        "falcon-40b",
        t.FalconConfig,
        t.FalconForCausalLM,
        values=dict(_FALCON, new_decoder_architecture=True, num_kv_heads=2, alibi=False),
    ),
    Family(
        "falcon-11b",
        t.FalconConfig,
        t.FalconForCausalLM,
        values=dict(_FALCON, new_decoder_architecture=True, num_kv_heads=2, alibi=False, num_ln_in_parallel_attn=1),
    ),
    Family(
        "falcon-rw",
        t.FalconConfig,
        t.FalconForCausalLM,
        values=dict(_FALCON, alibi=True, multi_query=False, parallel_attn=False, bias=True),
    ),
    Family(
        "falcon-rw-rotary",
        t.FalconConfig,
        t.FalconForCausalLM,
        values=dict(_FALCON, alibi=False, multi_query=False, parallel_attn=False, bias=True),
    ),
    Family(
        "mpt",
        t.MptConfig,
        t.MptForCausalLM,
        values=dict(d_model=48, n_layers=3, n_heads=4, vocab_size=96, max_seq_len=128),
    ),
]
BERT_LINEAGE = [
    Family("bert", t.BertConfig, t.BertForMaskedLM, "encoder", ENCODER),
    Family("bert-decoder", t.BertConfig, t.BertLMHeadModel, "decoder", dict(ENCODER, is_decoder=True)),
    Family("roberta", t.RobertaConfig, t.RobertaForMaskedLM, "encoder", dict(ENCODER, pad_token_id=1)),
    Family(
        "xlm-roberta",
        t.XLMRobertaConfig,
        t.XLMRobertaForSequenceClassification,
        "encoder",
        dict(ENCODER, pad_token_id=1),
    ),
    Family("electra", t.ElectraConfig, t.ElectraForTokenClassification, "encoder", dict(ENCODER, embedding_size=32)),
    Family(
        "distilbert",
        t.DistilBertConfig,
        t.DistilBertForQuestionAnswering,
        "encoder",
        dict(dim=48, n_layers=3, n_heads=4, hidden_dim=80, vocab_size=96, max_position_embeddings=128),
    ),
    Family(
        "albert",
        t.AlbertConfig,
        t.AlbertModel,
        "encoder",
        dict(ENCODER, embedding_size=32, num_hidden_groups=2, inner_group_num=2),
    ),
    Family(
        "modernbert",
        t.ModernBertConfig,
        t.ModernBertModel,
        "encoder",
        dict(ENCODER, local_attention=6, global_attn_every_n_layers=2),
    ),
    Family("clip-text", t.CLIPTextConfig, t.CLIPTextModel, "encoder", _CLIP_TEXT),
    Family("clip-vision", t.CLIPVisionConfig, t.CLIPVisionModel, "vision", _CLIP_VISION),
    Family(
        "clip",
        t.CLIPConfig,
        t.CLIPModel,
        "both",
        dict(text_config=_CLIP_TEXT, vision_config=_CLIP_VISION, projection_dim=32),
    ),
    Family(
        "vit",
        t.ViTConfig,
        t.ViTForImageClassification,
        "vision",
        dict(
            hidden_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=80,
            image_size=16,
            patch_size=8,
        ),
    ),
]
_T5 = dict(d_model=48, d_kv=4, d_ff=80, num_layers=3, num_heads=4, vocab_size=96, decoder_start_token_id=0)
_T5_GATED = dict(_T5, feed_forward_proj="gated-gelu", relative_attention_num_buckets=8)
T5_LINEAGE = [
    Family("t5", t.T5Config, t.T5EncoderModel, "encoder", dict(_T5, relative_attention_max_distance=11)),
    Family("t5-gated", t.T5Config, t.T5EncoderModel, "encoder", _T5_GATED),
    Family("mt5", t.MT5Config, t.MT5EncoderModel, "encoder", dict(_T5_GATED, d_kv=6)),
    Family("umt5", t.UMT5Config, t.UMT5EncoderModel, "encoder", dict(_T5_GATED, relative_attention_max_distance=16)),
]
_GEMMA4 = dict(
    GQA,
    head_dim=16,
    global_head_dim=24,
    sliding_window=5,
    num_hidden_layers=4,
    num_kv_shared_layers=2,
    layer_types=["sliding_attention", "full_attention"] * 2,
)
_GEMMA4_EXPERTS = dict(_GEMMA4, enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=24)
# Layers that lend keys and values, and some that borrow them; inputs for each layer; keys that are values.
GEMMA4 = [
    Family("gemma4", t.Gemma4TextConfig, t.Gemma4ForCausalLM,
           values=dict(_GEMMA4, hidden_size_per_layer_input=16, vocab_size_per_layer_input=96,
                       use_double_wide_mlp=True)),
    Family("gemma4-dense", t.Gemma4TextConfig, t.Gemma4ForCausalLM,
           values=dict(_GEMMA4, hidden_size_per_layer_input=0, num_kv_shared_layers=0, attention_k_eq_v=True,
                       num_global_key_value_heads=1, num_hidden_layers=2, layer_types=_GEMMA4["layer_types"][:2])),
    Family("gemma4-unified", t.Gemma4UnifiedTextConfig, t.Gemma4UnifiedForCausalLM, values=_GEMMA4),
    Family("gemma4-experts", t.Gemma4TextConfig, t.Gemma4ForCausalLM,
           values=dict(_GEMMA4_EXPERTS, hidden_size_per_layer_input=0, num_kv_shared_layers=0, attention_k_eq_v=True)),
    Family("gemma4-experts-inputs", t.Gemma4TextConfig, t.Gemma4ForCausalLM,
           values=dict(_GEMMA4_EXPERTS, hidden_size_per_layer_input=16, vocab_size_per_layer_input=96)),
    Family("embedding-gemma2", t.EmbeddingGemma2TextConfig, t.EmbeddingGemma2TextModel, "encoder",
           dict(GQA, head_dim=16, global_head_dim=24, sliding_window=5, hidden_size_per_layer_input=16,
                vocab_size_per_layer_input=96, layer_types=["sliding_attention", "full_attention", "full_attention"])),
]  # fmt: skip
_DEBERTA = dict(ENCODER, relative_attention=True, pos_att_type=["p2c", "c2p"])
RELATIVE = [
    Family("mpnet", t.MPNetConfig, t.MPNetForMaskedLM, "encoder", dict(ENCODER, pad_token_id=1)),
    Family("deberta-v3", t.DebertaV2Config, t.DebertaV2ForMaskedLM, "encoder",
           dict(_DEBERTA, position_buckets=4, share_att_key=True, norm_rel_ebd="layer_norm", type_vocab_size=0,
                position_biased_input=False)),
    Family("deberta-v2", t.DebertaV2Config, t.DebertaV2ForSequenceClassification, "encoder",
           dict(_DEBERTA, max_relative_positions=7, conv_kernel_size=3)),
]  # fmt: skip
# Without a spec, now or before. Layer scale; tables without rows for a prefix; keys without a bias.
_PICTURES = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=80)
READ_ALONE = [
    Family("internvl-vision", t.InternVLVisionConfig, t.InternVLVisionModel, "vision",
           dict(_PICTURES, image_size=[16, 16], patch_size=[8, 8])),
    Family("dinov3", t.DINOv3ViTConfig, t.DINOv3ViTModel, "vision",
           dict(_PICTURES, image_size=16, patch_size=8, num_register_tokens=2)),
]  # fmt: skip

_DELTA = dict(
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=12, linear_value_head_dim=10, head_dim=12,
    rms_norm_eps=1e-2,  # a small one makes much of rounding where the first queries and keys are nearly orthogonal
    layer_types=["linear_attention", "full_attention", "linear_attention"],
)  # fmt: skip
_WIDE_DELTA = {**_DELTA, "linear_key_head_dim": 32, "linear_value_head_dim": 20}  # its norm has an eps of its own
_DELTA_MOE = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=16
)  # fmt: skip
_CONVS = dict(layer_types=["conv", "full_attention", "conv"])
_SPACES = dict(
    mamba_n_heads=6, mamba_d_head=16, mamba_d_state=12, mamba_n_groups=2, mamba_expand=2, mamba_chunk_size=4
)  # fmt: skip
_MULTIPLIERS = dict(
    lm_head_multiplier=0.6, embedding_multiplier=1.7, mlp_multipliers=[0.7, 1.3], key_multiplier=0.8,
    attention_in_multiplier=1.2, attention_out_multiplier=0.9, ssm_in_multiplier=1.1, ssm_out_multiplier=0.7,
    ssm_multipliers=[0.6, 1.4, 0.8, 1.2, 0.9],
)  # fmt: skip
_SPACE_LAYERS = ["linear_attention", "full_attention", "linear_attention"]
# Attention and a state space in one layer.
SPACES_BESIDE = [
    Family(
        f"falcon_h1{name}", t.FalconH1Config, t.FalconH1ForCausalLM,
        values=dict(GQA, **{**_SPACES, "mamba_d_ssm": 96, **more}),
    )
    for name, more in (
        ("", dict(_MULTIPLIERS, time_step_limit=(0.3, 2.0))),
        ("-gated-norm", dict(_MULTIPLIERS, mamba_rms_norm=True, mamba_norm_before_gate=True, mamba_n_groups=1)),
        ("-gate-first", dict(mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_proj_bias=True)),
    )
]  # fmt: skip
# A shared block of attention and MLP, which stays, beside some of the state spaces.
ZAMBA2 = Family(
    "zamba2", t.Zamba2Config, t.Zamba2ForCausalLM,
    values=dict(
        GQA, num_hidden_layers=4, num_key_value_heads=4, layers_block_type=["linear_attention", "hybrid"] * 2,
        n_mamba_heads=6, mamba_headdim=16, mamba_d_state=12, mamba_ngroups=2, chunk_size=4, num_mem_blocks=1,
        use_shared_attention_adapter=True, adapter_rank=6, use_mem_rope=True,
    ),
)  # fmt: skip
HYBRIDS = [
    Family("lfm2", t.Lfm2Config, t.Lfm2ForCausalLM, values=dict(GQA, **_CONVS, block_auto_adjust_ff_dim=False)),
    Family("lfm2-bias", t.Lfm2Config, t.Lfm2ForCausalLM, values=dict(GQA, **_CONVS, conv_bias=True, conv_L_cache=5)),
    Family(
        "lfm2_moe", t.Lfm2MoeConfig, t.Lfm2MoeForCausalLM,
        values=dict(GQA, **_CONVS, num_dense_layers=1, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
    ),
    Family(
        "lfm3", t.Lfm3Config, t.Lfm3ForCausalLM,
        values=dict(GQA, layer_types=["conv", "full_attention", "sliding_attention"], sliding_window=6, head_dim=12),
    ),
    Family(
        "qwen3_next", t.Qwen3NextConfig, t.Qwen3NextForCausalLM,
        values=dict(GQA, **_DELTA, **_DELTA_MOE, mlp_only_layers=[0]),
    ),
    Family("qwen3_5", t.Qwen3_5TextConfig, t.Qwen3_5ForCausalLM, values=dict(GQA, **_DELTA)),
    Family(
        "qwen3_5_moe", t.Qwen3_5MoeTextConfig, t.Qwen3_5MoeForCausalLM, values=dict(GQA, **_DELTA, **_DELTA_MOE)
    ),
    Family(
        "lara_mini", t.LaraMiniConfig, t.LaraMiniForCausalLM,
        values=dict(
            {key: value for key, value in GQA.items() if key != "intermediate_size"}, **{**_DELTA, **_DELTA_MOE},
            sliding_window=5,
        )
        | dict(layer_types=["linear_attention", "sliding_attention", "full_attention"]),
    ),
    Family("olmo_hybrid", t.OlmoHybridConfig, t.OlmoHybridForCausalLM, values=dict(GQA, **_WIDE_DELTA)),
    Family(
        "olmo_hybrid-without-positions", t.OlmoHybridConfig, t.OlmoHybridForCausalLM,
        values=dict(GQA, **_WIDE_DELTA, rope_parameters=None, linear_allow_neg_eigval=False),
    ),
    Family(
        "granitemoehybrid", t.GraniteMoeHybridConfig, t.GraniteMoeHybridForCausalLM,
        values=dict(
            GQA, **_SPACES, layer_types=_SPACE_LAYERS, num_local_experts=4, num_experts_per_tok=2,
            shared_intermediate_size=24, residual_multiplier=0.7, attention_multiplier=0.4,
        ),
    ),
    Family(
        "granitemoehybrid-dense", t.GraniteMoeHybridConfig, t.GraniteMoeHybridForCausalLM,
        values=dict(
            GQA, **{**_SPACES, "mamba_n_groups": 1}, layer_types=_SPACE_LAYERS, num_local_experts=0,
            shared_intermediate_size=64, position_embedding_type="rope",
        ),
    ),
    Family(
        "bamba", t.BambaConfig, t.BambaForCausalLM,
        values=dict(
            GQA, **_SPACES, attn_layer_indices=[1], mamba_d_ssm=96, time_step_limit=(0.3, 2.0), rms_norm_eps=1e-2
        ),
    ),
    *(
        Family(
            name, t.NemotronHConfig, t.NemotronHForCausalLM,
            values=dict(
                {key: value for key, value in GQA.items() if key != "num_hidden_layers"}, mamba_num_heads=6,
                mamba_head_dim=16, ssm_state_size=12, n_groups=2, chunk_size=4, head_dim=12, n_routed_experts=4,
                num_experts_per_tok=2, moe_intermediate_size=24, moe_shared_expert_intermediate_size=16, n_group=1,
                topk_group=1, layers_block_type=["linear_attention", "moe", "full_attention", "mlp"], **more,
            ),
        )
        for name, more in (("nemotron_h", {}), ("nemotron_h-latent", dict(moe_latent_size=24)))
    ),
]  # fmt: skip

_JAMBA = dict(
    GQA, mamba_d_state=16, mamba_dt_rank=24, num_experts=4, num_experts_per_tok=2, expert_layer_period=2,
    expert_layer_offset=1,
)  # fmt: skip
JAMBA = [
    Family("jamba", t.JambaConfig, t.JambaForCausalLM, values=dict(_JAMBA, attn_layer_period=3, attn_layer_offset=1)),
    Family(
        "jamba-dense", t.JambaConfig, t.JambaForCausalLM,
        values=dict(
            _JAMBA, attn_layer_period=3, attn_layer_offset=0, num_experts=1, mamba_proj_bias=True, mamba_conv_bias=False
        ),
    ),
]  # fmt: skip
# Layers without an MLP, in models whose calls are others than those of attention: test_mamba.py.
_MAMBA = dict(
    hidden_size=48, num_hidden_layers=3, vocab_size=96, pad_token_id=0, bos_token_id=1, eos_token_id=2, state_size=12,
    time_step_rank=5,
)  # fmt: skip
MAMBA = [
    Family("mamba", t.MambaConfig, t.MambaForCausalLM, values=_MAMBA),
    Family(
        "mamba-narrow", t.MambaConfig, t.MambaForCausalLM,
        values=dict(_MAMBA, residual_in_fp32=False, use_bias=True, use_conv_bias=False, conv_kernel=3),
    ),
    Family("falcon_mamba", t.FalconMambaConfig, t.FalconMambaForCausalLM, values=_MAMBA),
    *(
        Family(
            f"mamba2{name}", t.Mamba2Config, t.Mamba2ForCausalLM,
            values=dict(
                hidden_size=48, num_hidden_layers=3, vocab_size=96, num_heads=6, head_dim=16, state_size=12, n_groups=2,
                chunk_size=4, pad_token_id=0, bos_token_id=1, eos_token_id=2, residual_in_fp32=wide,
            ),
        )
        for name, wide in (("", True), ("-narrow", False))
    ),
]  # fmt: skip

_KIMI = dict(
    {name: value for name, value in _LATENT_MOE.items() if name not in ("q_lora_rank", "n_routed_experts")},
    layer_types=_SPACE_LAYERS,
)  # fmt: skip
# Beside layers of latent attention; decays with and without a bound.
CHANNEL_DELTA = [
    Family(
        "kimi_linear", t.KimiLinearConfig, t.KimiLinearForCausalLM,
        values=dict(_KIMI, linear_head_dim=12, linear_num_heads=5, linear_conv_kernel_dim=3),
    ),
    Family(
        "kimi_linear-low-rank", t.KimiLinearConfig, t.KimiLinearForCausalLM,
        values=dict(
            _KIMI, linear_head_dim=8, linear_num_heads=4, q_lora_rank=16, attention_bias=True, moe_renormalize=False,
            mlp_layer_types=["sparse"] * 3,
        ),
    ),
    Family(
        "bailing_hybrid", t.BailingHybridConfig, t.BailingHybridForCausalLM, values=dict(_KIMI, head_dim=12)
    ),
    Family(
        "bailing_hybrid-unbounded", t.BailingHybridConfig, t.BailingHybridForCausalLM,
        values=dict(_KIMI, head_dim=16, q_lora_rank=16, kda_safe_gate=False, rope_parameters=dict(_YARN)),
    ),
]  # fmt: skip

_EVERY = (
    *LLAMA,
    *MIXTURES,
    *LATENT,
    *HYBRIDS,
    *SPACES_BESIDE,
    *CHANNEL_DELTA,
    *JAMBA,
    *GPT_LINEAGE,
    *BERT_LINEAGE,
    *GEMMA4,
    *T5_LINEAGE,
    *RELATIVE,
    *READ_ALONE,
)
FAMILIES = [family for family in _EVERY if family.is_there]
DECODERS = [family for family in FAMILIES if family.kind == "decoder"]
# Each has the parts, the norms' places and the positions of another, or some of them. It is read, computes in float32
# and decodes in every run; what does not depend on its names and packing is tested with --variants.
RELATIVES = frozenset(
    {
        "mistral", "phi3", "gemma", "cohere", "phi", "gpt2-inverse", "bigcode-heads", "codegen", "gpt-neox-serial",
        "roberta", "xlm-roberta", "electra", "distilbert", "clip-text", "clip-vision", "internvl-vision",
        "mt5", "qwen3-omni", "glm4-moe-lite",
    }
)  # fmt: skip
BY_NAME = {family.name: family for family in (*_EVERY, *MAMBA, ZAMBA2) if family.is_there}
# The families of the fast gate (tests/support/gate.py). The first four are the usual ones. The others were added one
# by one, each the one with the most parts and values of the parts' fields (set or not, where they are numbers) that
# those before it lack. Of 507 such values of all families, these have 463.
COVERING = frozenset(
    {
        "llama", "gpt2", "bert", "mixtral", "gemma4-experts-inputs", "bailing_hybrid-unbounded", "falcon_h1", "llama4",
        "bitnet", "qwen3_next", "falcon_mamba", "lfm3", "deberta-v3", "kimi_linear-low-rank", "nemotron_h-latent", "t5",
        "gpt-oss", "ernie4_5-moe", "mistral4", "dinov3",
    }
)  # fmt: skip


def inputs(
    family: Family, batch: int = 2, tokens: int = 11, padding: str | None = None, seed: int = 1
) -> dict[str, torch.Tensor]:
    """Random arguments for the model's forward; `padding` "left" or "right" hides three positions of the first row."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, torch.Tensor] = {}
    if family.kind in ("vision", "both"):
        made["pixel_values"] = torch.randn(batch, 3, 16, 16, generator=generator)
    if family.kind != "vision":
        made["input_ids"] = torch.randint(3, family.vocabulary, (batch, tokens), generator=generator)
        mask = torch.ones(batch, tokens, dtype=torch.long)
        if padding:
            mask[0, : 3 if padding == "left" else None] = 0
        if padding == "right":
            mask[0] = 1
            mask[0, -3:] = 0
        made["attention_mask"] = mask
    return made


Maker = Callable[[], torch.nn.Module]
