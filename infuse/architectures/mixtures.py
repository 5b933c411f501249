"""Mixtures of experts: decoders whose feed-forward part is a mixture, in all layers or in some."""

from infuse.architectures.attention import Rotary
from infuse.architectures.layer import SANDWICH
from infuse.architectures.llama import LLAMA, MISTRAL, QWEN3
from infuse.architectures.mlp import GatedMLP, PackedGatedMLP
from infuse.architectures.moe import MoE
from infuse.architectures.norm import LAYER, RMS, Norm
from infuse.architectures.router import (
    ACTIVATIONS,
    FLOAT32,
    LOGITS,
    SIGMOID,
    SOFTMAX_OF_SCORES,
    SPARSE_MIXER,
    WIDENED,
    Groups,
    Router,
)

_M = "transformers.models."
_BIAS = "e_score_correction_bias"


def _gated(path: str) -> GatedMLP:
    return GatedMLP(gate=f"{path}.gate_proj", up=f"{path}.up_proj", down=f"{path}.down_proj")


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
    "mlp.gate", logits=FLOAT32, correction=f"mlp.gate.moe_statics.{_BIAS}", normalise=True, least="norm_min",
    cast=ACTIVATIONS,
)  # fmt: skip
MINIMAX_ROUTER = Router("mlp.gate", score=SIGMOID, correction=f"mlp.{_BIAS}", normalise=True, in_order=False)
HUNYUAN_ROUTER = Router("mlp.gate", weight="wg.weight", bias="wg.bias", normalise=True, cast=LOGITS)
HY_ROUTER = Router(
    "mlp.gate", logits=FLOAT32, score=SIGMOID, correction=f"mlp.{_BIAS}", normalise=True, eps=1e-20,
    scale="router_scaling_factor", in_order=False,
)  # fmt: skip

_QK_NORM = dict(q_norm=Norm("self_attn.q_norm", RMS), k_norm=Norm("self_attn.k_norm", RMS))
_SHARED = _gated("mlp.shared_experts")
_DEEPSEEK_MOE = MoE(DEEPSEEK_ROUTER, shared=_SHARED, dense=_gated("mlp"))

MIXTRAL = MISTRAL.but(layer=_M + "mixtral.modeling_mixtral.MixtralDecoderLayer", mlp=MoE(MIXTRAL_ROUTER))
QWEN3_MOE = QWEN3.but(
    layer=_M + "qwen3_moe.modeling_qwen3_moe.Qwen3MoeDecoderLayer", mlp=MoE(QWEN_ROUTER, dense=_gated("mlp"))
)
QWEN2_MOE = LLAMA.but(
    layer=_M + "qwen2_moe.modeling_qwen2_moe.Qwen2MoeDecoderLayer",
    mlp=MoE(QWEN_ROUTER, shared=_gated("mlp.shared_expert"), gate="mlp.shared_expert_gate", dense=_gated("mlp")),
)
MELLUM = QWEN3_MOE.but(layer=_M + "mellum.modeling_mellum.MellumDecoderLayer")
OLMOE = MISTRAL.but(
    layer=_M + "olmoe.modeling_olmoe.OlmoeDecoderLayer",
    attn=_QK_NORM,
    mlp=MoE(QWEN_ROUTER),
    expect=(("clip_qkv", None),),
)
FLEX_OLMO = LLAMA.but(
    layer=_M + "flex_olmo.modeling_flex_olmo.FlexOlmoDecoderLayer",
    residual=SANDWICH,
    norm1=None,
    norm2=None,
    post1=Norm("post_attention_layernorm", RMS),
    post2=Norm("post_feedforward_layernorm", RMS),
    attn=_QK_NORM,
    mlp=MoE(QWEN_ROUTER),
)
GLM4_MOE = LLAMA.but(layer=_M + "glm4_moe.modeling_glm4_moe.Glm4MoeDecoderLayer", attn=_QK_NORM, mlp=_DEEPSEEK_MOE)
DOTS1 = QWEN3.but(layer=_M + "dots1.modeling_dots1.Dots1DecoderLayer", mlp=_DEEPSEEK_MOE)
SOLAR_OPEN = LLAMA.but(layer=_M + "solar_open.modeling_solar_open.SolarOpenDecoderLayer", mlp=_DEEPSEEK_MOE)
HY_V3 = LLAMA.but(
    layer=_M + "hy_v3.modeling_hy_v3.HYV3DecoderLayer",
    attn=_QK_NORM,
    mlp=MoE(HY_ROUTER, shared=_SHARED, dense=_gated("mlp")),
)
MINIMAX_M2 = LLAMA.but(
    layer=_M + "minimax_m2.modeling_minimax_m2.MiniMaxM2DecoderLayer", attn=_QK_NORM, mlp=MoE(MINIMAX_ROUTER)
)
ERNIE4_5_MOE = LLAMA.but(
    layer=_M + "ernie4_5_moe.modeling_ernie4_5_moe.Ernie4_5_MoeDecoderLayer",
    attn=dict(position=Rotary(interleaved=True, in_halves=True)),
    mlp=MoE(ERNIE_ROUTER, shared=_SHARED, dense=_gated("mlp")),
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
HUNYUAN_MOE = LLAMA.but(
    layer=_M + "hunyuan_v1_moe.modeling_hunyuan_v1_moe.HunYuanMoEV1DecoderLayer",
    attn=dict(
        q_norm=Norm("self_attn.query_layernorm", RMS), k_norm=Norm("self_attn.key_layernorm", RMS), norm_after=True
    ),
    mlp=MoE(HUNYUAN_ROUTER, shared=_gated("mlp.shared_mlp")),
)
PHIMOE = LLAMA.but(
    layer=_M + "phimoe.modeling_phimoe.PhimoeDecoderLayer",
    norm1=Norm("input_layernorm", LAYER),
    norm2=Norm("post_attention_layernorm", LAYER),
    mlp=MoE(PHI_ROUTER),
)

SPECS = (
    MIXTRAL, QWEN3_MOE, QWEN2_MOE, MELLUM, OLMOE, FLEX_OLMO, GLM4_MOE, DOTS1, SOLAR_OPEN, HY_V3, MINIMAX_M2,
    ERNIE4_5_MOE, GRANITE_MOE, GRANITE_MOE_SHARED, HUNYUAN_MOE, PHIMOE,
)  # fmt: skip
