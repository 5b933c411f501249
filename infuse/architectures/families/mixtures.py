"""Mixtures of experts: decoders whose feed-forward part is a mixture, in all layers or in some.

They are written: a graph has one way through a router for the tokens that it was made with, and experts whose function
the config names.
"""

from dataclasses import replace

from infuse.architectures.families.llama import GRANITE_SINKS, LLAMA, QK_NORM, SINKS, WINDOW
from infuse.architectures.parts.attention import GATE_SOFTPLUS, OutputGate, Rotary
from infuse.architectures.parts.mlp import GatedMLP, PackedGatedMLP
from infuse.architectures.parts.moe import MoE
from infuse.architectures.parts.norm import LAYER, RMS, Norm
from infuse.architectures.parts.router import Groups, Router
from infuse.architectures.program import PARALLEL, SANDWICH
from infuse.ground.routing import (
    ACTIVATIONS,
    FLOAT32,
    LOGITS,
    MAX,
    PICKED,
    SIGMOID,
    SIGMOID_OF_SCORES,
    SOFTMAX_OF_SCORES,
    SPARSE_MIXER,
    WIDENED,
)

_M = "transformers.models."
_BIAS = "e_score_correction_bias"


MIXTRAL_ROUTER = Router("mlp.gate", normalise=True)
QWEN_ROUTER = Router("mlp.gate", normalise="norm_topk_prob", cast=LOGITS)
DEEPSEEK_ROUTER = Router(
    "mlp.gate", logits=FLOAT32, score=SIGMOID, correction=f"mlp.gate.{_BIAS}", groups=Groups(),
    normalise="norm_topk_prob", eps=1e-20, scale="routed_scaling_factor", in_order=False,
)  # fmt: skip
GRANITE_ROUTER = Router(
    "block_sparse_moe.router", logits=WIDENED, score=None, weights=SOFTMAX_OF_SCORES, cast=ACTIVATIONS
)
PHI_ROUTER = Router("mlp.router", score=SPARSE_MIXER, rounded_score=True, jitter="router_jitter_noise")
ERNIE_ROUTER = Router(
    "mlp.gate",
    logits=FLOAT32,
    correction=f"mlp.gate.moe_statics.{_BIAS}",
    normalise=True,
    least="norm_min",
    cast=ACTIVATIONS,
)
MINIMAX_ROUTER = Router("mlp.gate", score=SIGMOID, correction=f"mlp.{_BIAS}", normalise=True, in_order=False)
OSS_ROUTER = Router("mlp.router", score=None, rounded_score=True, weights=SOFTMAX_OF_SCORES)
FLINT_ROUTER = Router("mlp.gate", logits=FLOAT32, score=SIGMOID, normalise="norm_topk_prob")
HUNYUAN_ROUTER = Router("mlp.gate", weight="wg.weight", bias="wg.bias", normalise=True, cast=LOGITS)
HY_ROUTER = Router(
    "mlp.gate",
    logits=FLOAT32,
    score=SIGMOID,
    correction=f"mlp.{_BIAS}",
    normalise=True,
    eps=1e-20,
    scale="router_scaling_factor",
    in_order=False,
)
AFMOE_ROUTER = Router(
    "mlp.router",
    weight="gate.weight",
    logits=WIDENED,
    score=SIGMOID,
    correction="mlp.expert_bias",
    normalise=True,
    eps=1e-20,
    scale="route_scale",
)
LAGUNA_ROUTER = Router(
    "mlp.gate",
    logits=WIDENED,
    score=SIGMOID,
    correction=f"mlp.gate.{_BIAS}",
    normalise=True,
    cap="router_logit_softcapping",
    cast=ACTIVATIONS,
)
KOLIBRI_ROUTER = Router(
    "mlp.gate",
    logits=FLOAT32,
    score=None,
    correction=f"mlp.gate.{_BIAS}",
    weights=SIGMOID_OF_SCORES,
    normalise="norm_topk_prob",
)
# Cohere2-MoE chooses by logits and weighs by one of two functions of those.
COHERE_SOFTMAX_ROUTER = Router("mlp.gate", score=None, weights=SOFTMAX_OF_SCORES, cast=ACTIVATIONS)
COHERE_SIGMOID_ROUTER = Router(
    "mlp.gate", score=None, rounded_score=True, weights=SIGMOID_OF_SCORES, normalise="norm_topk_prob", cast=ACTIVATIONS
)
ARIA_ROUTER = Router("mlp.router", score=None, rounded_score=True, weights=SOFTMAX_OF_SCORES)
DEEPSEEK_V2_ROUTER = Router("mlp.gate", logits=FLOAT32, weights=PICKED, scale="routed_scaling_factor", in_order=False)
MISTRAL4_ROUTER = Router(
    "mlp.gate",
    rounded_score=True,
    groups=Groups(fill=0.0),
    normalise="norm_topk_prob",
    eps=1e-20,
    scale="routed_scaling_factor",
    in_order=False,
)

# The dense layers that mixtures are like: Mistral's and Qwen 3's.
_MISTRAL = LLAMA.but(attn=dict(passes=WINDOW))
_QWEN3 = LLAMA.but(attn=dict(passes=WINDOW, **QK_NORM))
_SHARED = GatedMLP.at("mlp.shared_experts")
DEEPSEEK_MOE = MoE(DEEPSEEK_ROUTER, shared=_SHARED, dense=GatedMLP.at("mlp"))
DEEPSEEK_V2_MOE = MoE(DEEPSEEK_V2_ROUTER, shared=_SHARED, dense=GatedMLP.at("mlp"))
DEEPSEEK_V2_GROUPED = replace(DEEPSEEK_V2_MOE, router=replace(DEEPSEEK_V2_ROUTER, groups=Groups(MAX, fill=0.0)))
WITHOUT_GROUPS, IN_GROUPS = (("topk_method", "greedy"),), (("topk_method", "group_limited_greedy"),)
MISTRAL4_MOE = MoE(MISTRAL4_ROUTER, shared=_SHARED, dense=GatedMLP.at("mlp"))

MIXTRAL = _MISTRAL.but(layer=_M + "mixtral.modeling_mixtral.MixtralDecoderLayer", mlp=MoE(MIXTRAL_ROUTER))
QWEN3_MOE = _QWEN3.but(
    layer=_M + "qwen3_moe.modeling_qwen3_moe.Qwen3MoeDecoderLayer", mlp=MoE(QWEN_ROUTER, dense=GatedMLP.at("mlp"))
)
QWEN2_MOE = LLAMA.but(
    layer=_M + "qwen2_moe.modeling_qwen2_moe.Qwen2MoeDecoderLayer",
    mlp=MoE(
        QWEN_ROUTER, shared=GatedMLP.at("mlp.shared_expert"), gate="mlp.shared_expert_gate", dense=GatedMLP.at("mlp")
    ),
)
MELLUM = QWEN3_MOE.but(layer=_M + "mellum.modeling_mellum.MellumDecoderLayer")
OLMOE = _MISTRAL.but(
    layer=_M + "olmoe.modeling_olmoe.OlmoeDecoderLayer",
    attn={**QK_NORM, "clip": "config.clip_qkv"},
    mlp=MoE(QWEN_ROUTER),
)
FLEX_OLMO = LLAMA.but(
    layer=_M + "flex_olmo.modeling_flex_olmo.FlexOlmoDecoderLayer",
    residual=SANDWICH,
    norm1=None,
    norm2=None,
    post1=Norm("post_attention_layernorm", RMS),
    post2=Norm("post_feedforward_layernorm", RMS),
    attn=QK_NORM,
    mlp=MoE(QWEN_ROUTER),
)
GLM4_MOE = LLAMA.but(layer=_M + "glm4_moe.modeling_glm4_moe.Glm4MoeDecoderLayer", attn=QK_NORM, mlp=DEEPSEEK_MOE)
DOTS1 = _QWEN3.but(layer=_M + "dots1.modeling_dots1.Dots1DecoderLayer", mlp=DEEPSEEK_MOE)
SOLAR_OPEN = LLAMA.but(layer=_M + "solar_open.modeling_solar_open.SolarOpenDecoderLayer", mlp=DEEPSEEK_MOE)
HY_V3 = LLAMA.but(
    layer=_M + "hy_v3.modeling_hy_v3.HYV3DecoderLayer",
    attn=QK_NORM,
    mlp=MoE(HY_ROUTER, shared=_SHARED, dense=GatedMLP.at("mlp")),
)
MINIMAX_M2 = LLAMA.but(
    layer=_M + "minimax_m2.modeling_minimax_m2.MiniMaxM2DecoderLayer", attn=QK_NORM, mlp=MoE(MINIMAX_ROUTER)
)
ERNIE4_5_MOE = LLAMA.but(
    layer=_M + "ernie4_5_moe.modeling_ernie4_5_moe.Ernie4_5_MoeDecoderLayer",
    attn=dict(position=Rotary(interleaved=True, in_halves=True)),
    mlp=MoE(ERNIE_ROUTER, shared=_SHARED, dense=GatedMLP.at("mlp")),
)
GRANITE_MOE = LLAMA.but(
    layer=_M + "granitemoe.modeling_granitemoe.GraniteMoeDecoderLayer",
    residual_scale="residual_multiplier",
    mlp=MoE(GRANITE_ROUTER, experts="block_sparse_moe.experts"),
)
GRANITE_MOE_SHARED = GRANITE_MOE.but(
    layer=_M + "granitemoeshared.modeling_granitemoeshared.GraniteMoeSharedDecoderLayer",
    mlp=dict(shared=PackedGatedMLP(gate_up="shared_mlp.input_linear", down="shared_mlp.output_linear")),
)
GRANITE_MOE_SWA = GRANITE_MOE_SHARED.but(
    layer=_M + "granitemoe_swa.modeling_granitemoe_swa.GraniteMoeSWADecoderLayer", attn=GRANITE_SINKS
)
GPT_OSS = LLAMA.but(
    layer=_M + "gpt_oss.modeling_gpt_oss.GptOssDecoderLayer",
    attn=dict(SINKS, position=Rotary(once=True)),
    mlp=MoE(OSS_ROUTER),
)
FLINT = LLAMA.but(
    layer=_M + "flint.modeling_flint.FlintDecoderLayer",
    attn=dict(SINKS, position=Rotary(where=("sliding_window",)), **QK_NORM),
    mlp=MoE(FLINT_ROUTER, shared=GatedMLP.at("mlp.shared_expert"), dense=GatedMLP.at("mlp")),
)
HUNYUAN_MOE = LLAMA.but(
    layer=_M + "hunyuan_v1_moe.modeling_hunyuan_v1_moe.HunYuanMoEV1DecoderLayer",
    attn=dict(
        q_norm=Norm("self_attn.query_layernorm", RMS), k_norm=Norm("self_attn.key_layernorm", RMS), norm_after=True
    ),
    mlp=MoE(HUNYUAN_ROUTER, shared=GatedMLP.at("mlp.shared_mlp")),
)
PHIMOE = LLAMA.but(
    layer=_M + "phimoe.modeling_phimoe.PhimoeDecoderLayer",
    norm1=Norm("input_layernorm", LAYER),
    norm2=Norm("post_attention_layernorm", LAYER),
    mlp=MoE(PHI_ROUTER),
)

# Layers with a sliding window rotate, the others have no positions.
EXAONE_MOE = _QWEN3.but(
    layer=_M + "exaone_moe.modeling_exaone_moe.ExaoneMoeDecoderLayer",
    attn=dict(position=Rotary(where=("is_sliding",)), passes=(("sliding_window", "sliding_window", "is_sliding"),)),
    mlp=DEEPSEEK_MOE,
)
KOLIBRI1 = EXAONE_MOE.but(
    layer=_M + "kolibri1.modeling_kolibri1.Kolibri1DecoderLayer",
    residual=SANDWICH,
    post1=Norm("post_self_attn_layernorm", RMS),
    post2=Norm("post_mlp_layernorm", RMS),
    mlp=MoE(KOLIBRI_ROUTER, shared=_SHARED),
)
AFMOE = _QWEN3.but(
    layer=_M + "afmoe.modeling_afmoe.AfmoeDecoderLayer",
    residual=SANDWICH,
    post1=Norm("post_attention_layernorm", RMS),
    norm2=Norm("pre_mlp_layernorm", RMS),
    post2=Norm("post_mlp_layernorm", RMS),
    attn=dict(position=Rotary(where=("is_local_attention",)), gate=OutputGate("self_attn.gate_proj")),
    mlp=MoE(AFMOE_ROUTER, shared=_SHARED, dense=GatedMLP.at("mlp")),
)
LAGUNA = _QWEN3.but(
    layer=_M + "laguna.modeling_laguna.LagunaDecoderLayer",
    attn=dict(heads="num_attention_heads_per_layer", gate=OutputGate("self_attn.g_proj", GATE_SOFTPLUS)),
    mlp=MoE(LAGUNA_ROUTER, shared=_SHARED, dense=GatedMLP.at("mlp"), scale="routed_scaling_factor"),
)
_COHERE2_MOE = _MISTRAL.but(
    layer=_M + "cohere2_moe.modeling_cohere2_moe.Cohere2MoeDecoderLayer",
    residual=PARALLEL,
    norm2=None,
    attn=dict(position=Rotary(interleaved=True, where=("sliding_window", "force_rope"))),
    mlp=MoE(
        COHERE_SOFTMAX_ROUTER, shared=_SHARED, dense=GatedMLP.at("mlp"), combine="shared_expert_combination_strategy"
    ),
)
_LAYER_NORM = dict(norm1=Norm("input_layernorm", LAYER))
_BY_SOFTMAX, _WITHOUT_RMS = ("expert_selection_fn", "softmax"), ("rms_norm_eps", None)
COHERE2_MOE_SOFTMAX = _COHERE2_MOE.but(when=(_WITHOUT_RMS, _BY_SOFTMAX), **_LAYER_NORM)
COHERE2_MOE_RMS_SOFTMAX = _COHERE2_MOE.but(when=(_BY_SOFTMAX,))
_BY_SIGMOID = _COHERE2_MOE.but(mlp=dict(router=COHERE_SIGMOID_ROUTER), when=(("expert_selection_fn", "sigmoid"),))
COHERE2_MOE_SIGMOID = _BY_SIGMOID.but(when=(_WITHOUT_RMS, *_BY_SIGMOID.when), **_LAYER_NORM)
COHERE2_MOE_RMS_SIGMOID = _BY_SIGMOID

# Text layers of models that also see or hear.
ARIA_TEXT = LLAMA.but(layer=_M + "aria.modeling_aria.AriaTextDecoderLayer", mlp=MoE(ARIA_ROUTER, shared=_SHARED))
QWEN3_VL_MOE = _QWEN3.but(
    layer=_M + "qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeTextDecoderLayer",
    attn=dict(passes=()),
    mlp=MoE(replace(QWEN_ROUTER, normalise=True), dense=GatedMLP.at("mlp")),
)
QWEN3_OMNI_THINKER = QWEN3_MOE.but(
    layer=_M + "qwen3_omni_moe.modeling_qwen3_omni_moe.Qwen3OmniMoeThinkerTextDecoderLayer"
)
GLM4V_MOE = LLAMA.but(layer=_M + "glm4v_moe.modeling_glm4v_moe.Glm4vMoeTextDecoderLayer", mlp=DEEPSEEK_MOE)
_DEEPSEEK_OCR2 = LLAMA.but(
    layer=_M + "deepseek_ocr2.modeling_deepseek_ocr2.DeepseekOcr2TextDecoderLayer", mlp=DEEPSEEK_V2_MOE
)
DEEPSEEK_OCR2 = _DEEPSEEK_OCR2.but(when=WITHOUT_GROUPS)
DEEPSEEK_OCR2_GROUPS = _DEEPSEEK_OCR2.but(when=IN_GROUPS, mlp=DEEPSEEK_V2_GROUPED)

SPECS = (
    MIXTRAL, QWEN3_MOE, QWEN2_MOE, MELLUM, OLMOE, FLEX_OLMO, GLM4_MOE, DOTS1, SOLAR_OPEN, HY_V3, MINIMAX_M2,
    ERNIE4_5_MOE, GRANITE_MOE, GRANITE_MOE_SHARED, GRANITE_MOE_SWA, GPT_OSS, FLINT, HUNYUAN_MOE, PHIMOE, EXAONE_MOE,
    KOLIBRI1, AFMOE, LAGUNA, COHERE2_MOE_SOFTMAX, COHERE2_MOE_RMS_SOFTMAX, COHERE2_MOE_SIGMOID, COHERE2_MOE_RMS_SIGMOID,
    ARIA_TEXT, QWEN3_VL_MOE, QWEN3_OMNI_THINKER, GLM4V_MOE, DEEPSEEK_OCR2, DEEPSEEK_OCR2_GROUPS,
)  # fmt: skip
