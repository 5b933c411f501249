"""Towers that take the patches of several pictures, or pieces of sounds, in one row, with the places between them.

Their graphs depend on those places, so they are written down. Each patch attends to its own picture, frame or window.
"""

from infuse.architectures.layer import SINGLE, LayerSpec
from infuse.architectures.parts.attention import Attention, NoPosition, Packed, Rotary, Separate
from infuse.architectures.parts.mlp import MLP, GatedMLP
from infuse.architectures.parts.norm import LAYER, RMS, Norm
from infuse.architectures.program import CLAMP

_M = "transformers.models."

QWEN3_VL = LayerSpec(
    layer=_M + "qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionBlock",
    norm1=Norm("norm1", LAYER),
    attn=Attention(
        module="attn",
        qkv=Packed("attn.qkv"),
        out="attn.proj",
        heads="num_heads",
        position=Rotary(),
        passes=(("is_causal", "is_causal"),),
    ),
    norm2=Norm("norm2", LAYER),
    mlp=MLP(up="mlp.linear_fc1", down="mlp.linear_fc2"),
    ends="cu_seqlens",
)
_ALIKE = (
    "qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeVisionBlock",
    "qwen3_omni_moe.modeling_qwen3_omni_moe.Qwen3OmniMoeVisionBlock",
    "qwen3_5.modeling_qwen3_5.Qwen3_5VisionBlock",
    "qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeVisionBlock",
    "qwen4_exp.modeling_qwen4_exp.Qwen4ExpVisionBlock",
    "cohere_compass.modeling_cohere_compass.CohereCompassVisionBlock",
)
QWEN2_VL = QWEN3_VL.but(
    layer=_M + "qwen2_vl.modeling_qwen2_vl.Qwen2VLVisionBlock", mlp=MLP(up="mlp.fc1", down="mlp.fc2")
)
ERNIE4_5_VL = QWEN2_VL.but(layer=_M + "ernie4_5_vl_moe.modeling_ernie4_5_vl_moe.Ernie4_5_VLMoeVisionBlock")
QWEN2_5_VL = QWEN3_VL.but(
    layer=_M + "qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLVisionBlock",
    norm1=Norm("norm1", RMS),
    norm2=Norm("norm2", RMS),
    mlp=GatedMLP.at("mlp"),
)
QWEN2_5_OMNI = QWEN2_5_VL.but(
    layer=_M + "qwen2_5_omni.modeling_qwen2_5_omni.Qwen2_5OmniVisionBlock",
    attn=dict(qkv=Separate("attn.q", "attn.k", "attn.v")),
)
GLM4V = QWEN2_5_VL.but(layer=_M + "glm4v.modeling_glm4v.Glm4vVisionBlock")
GLM4V_MOE = QWEN2_5_VL.but(layer=_M + "glm4v_moe.modeling_glm4v_moe.Glm4vMoeVisionBlock")
GLM_OCR = GLM4V.but(
    layer=_M + "glm_ocr.modeling_glm_ocr.GlmOcrVisionBlock",
    attn=dict(q_norm=Norm("attn.q_norm", RMS), k_norm=Norm("attn.k_norm", RMS)),
)
GLM5_NEXT = GLM_OCR.but(layer=_M + "glm5_next.modeling_glm5_next.Glm5NextVisionBlock")
EXAONE4_5 = QWEN2_5_VL.but(
    layer=_M + "exaone4_5.modeling_exaone4_5.Exaone4_5_VisionBlock", attn=dict(kv_heads="num_key_value_heads")
)
KIMI_K25 = QWEN2_VL.but(
    layer=_M + "kimi_k25.modeling_kimi_k25.Kimi_K25VisionEncoderLayer",
    attn=dict(qkv=Separate("attn.q_proj", "attn.k_proj", "attn.v_proj"), heads="num_attention_heads"),
)
PADDLE_OCR = QWEN2_VL.but(
    layer=_M + "paddleocr_vl.modeling_paddleocr_vl.PaddleOCRVisionEncoderLayer",
    norm1=Norm("layer_norm1", LAYER),
    attn=dict(
        module="self_attn",
        qkv=Separate("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out="self_attn.out_proj",
        heads="num_attention_heads",
    ),
    norm2=Norm("layer_norm2", LAYER),
)
VIDEO_LLAMA3 = PADDLE_OCR.but(layer=_M + "video_llama_3.modeling_video_llama_3.VideoLlama3VisionEncoderLayer")

# Sounds in pieces of one length, and what is left.
QWEN3_OMNI_SOUND = PADDLE_OCR.but(
    layer=_M + "qwen3_omni_moe.modeling_qwen3_omni_moe.Qwen3OmniMoeAudioEncoderLayer",
    norm1=Norm("self_attn_layer_norm", LAYER),
    attn=dict(heads="encoder_attention_heads", position=NoPosition()),
    norm2=Norm("final_layer_norm", LAYER),
    mlp=MLP(up="fc1", down="fc2", activation="activation_function"),
    returns=SINGLE,
    clamps=CLAMP,
)
QWEN3_ASR_SOUND = QWEN3_OMNI_SOUND.but(layer=_M + "qwen3_asr.modeling_qwen3_asr.Qwen3ASRAudioEncoderLayer")

SPECS = (
    QWEN3_VL,
    *(QWEN3_VL.but(layer=_M + layer) for layer in _ALIKE),
    QWEN2_VL,
    ERNIE4_5_VL,
    QWEN2_5_VL,
    QWEN2_5_OMNI,
    GLM4V,
    GLM4V_MOE,
    GLM_OCR,
    GLM5_NEXT,
    EXAONE4_5,
    KIMI_K25,
    PADDLE_OCR,
    VIDEO_LLAMA3,
    QWEN3_OMNI_SOUND,
    QWEN3_ASR_SOUND,
)
