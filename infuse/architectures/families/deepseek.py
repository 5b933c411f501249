"""Layers with latent attention: DeepSeek's and those that are like them.

They are written: most are mixtures, whose routers no graph tells, and none of the parts that graphs are read into keeps
latents.
"""

from infuse.architectures.families.llama import LLAMA
from infuse.architectures.families.mixtures import (
    DEEPSEEK_MOE,
    DEEPSEEK_V2_GROUPED,
    DEEPSEEK_V2_MOE,
    IN_GROUPS,
    MISTRAL4_MOE,
    WITHOUT_GROUPS,
)
from infuse.architectures.parts.latent_attention import COMPLEX, HALVES, LatentAttention
from infuse.architectures.parts.norm import RMS, Norm
from infuse.architectures.program import SANDWICH

_M = "transformers.models."

YOUTU = LLAMA.but(layer=_M + "youtu.modeling_youtu.YoutuDecoderLayer", attn=LatentAttention())
MINICPM3 = LLAMA.but(
    layer=_M + "minicpm3.modeling_minicpm3.MiniCPM3DecoderLayer",
    attn=LatentAttention(rotation=HALVES),
    residual_attribute="residual_scale",
)
DEEPSEEK_V3 = YOUTU.but(layer=_M + "deepseek_v3.modeling_deepseek_v3.DeepseekV3DecoderLayer", mlp=DEEPSEEK_MOE)
_DEEPSEEK_V2 = LLAMA.but(
    layer=_M + "deepseek_v2.modeling_deepseek_v2.DeepseekV2DecoderLayer",
    attn=LatentAttention(rotation=COMPLEX),
    mlp=DEEPSEEK_V2_MOE,
)
DEEPSEEK_V2 = _DEEPSEEK_V2.but(when=WITHOUT_GROUPS)
DEEPSEEK_V2_GROUPS = _DEEPSEEK_V2.but(when=IN_GROUPS, mlp=DEEPSEEK_V2_GROUPED)
GLM4_MOE_LITE = DEEPSEEK_V3.but(layer=_M + "glm4_moe_lite.modeling_glm4_moe_lite.Glm4MoeLiteDecoderLayer")
MISTRAL4 = YOUTU.but(
    layer=_M + "mistral4.modeling_mistral4.Mistral4DecoderLayer", attn=LatentAttention(grows=True), mlp=MISTRAL4_MOE
)
# Mixtures have a norm of their own on their result, which dense layers lack.
AXK1 = DEEPSEEK_V3.but(
    layer=_M + "axk1.modeling_axk1.AXK1DecoderLayer",
    residual=SANDWICH,
    post2=Norm("mlp.post_mlp_layernorm", RMS, optional=True),
)
# They never bind, and say why.
WITH_INDEXERS = tuple(
    DEEPSEEK_V3.but(layer=_M + layer)
    for layer in (
        "deepseek_v32.modeling_deepseek_v32.DeepseekV32DecoderLayer",
        "glm_moe_dsa.modeling_glm_moe_dsa.GlmMoeDsaDecoderLayer",
        "axk2.modeling_axk2.AXK2DecoderLayer",
        "mistral_large4.modeling_mistral_large4.MistralLarge4TextDecoderLayer",
    )
)

SPECS = (YOUTU, MINICPM3, DEEPSEEK_V3, DEEPSEEK_V2, DEEPSEEK_V2_GROUPS, GLM4_MOE_LITE, MISTRAL4, AXK1, *WITH_INDEXERS)
