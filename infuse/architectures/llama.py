"""Llama family: rotary decoders with separate projections, most with RMSNorm and a gated MLP."""

from infuse.architectures.attention import Attention, Packed, Rotary, Separate, Sinks
from infuse.architectures.layer import LayerSpec
from infuse.architectures.mlp import MLP, GatedMLP, PackedGatedMLP
from infuse.architectures.norm import LAYER, RMS, Norm
from infuse.architectures.program import PARALLEL, PRE, SANDWICH

_M = "transformers.models."

LLAMA = LayerSpec(
    layer=_M + "llama.modeling_llama.LlamaDecoderLayer",
    norm1=Norm("input_layernorm", RMS),
    attn=Attention(
        module="self_attn",
        qkv=Separate("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out="self_attn.o_proj",
        kv_heads="num_key_value_heads",
        position=Rotary(),
    ),
    norm2=Norm("post_attention_layernorm", RMS),
    mlp=GatedMLP(gate="mlp.gate_proj", up="mlp.up_proj", down="mlp.down_proj"),
)
_QK_NORM = dict(q_norm=Norm("self_attn.q_norm", RMS), k_norm=Norm("self_attn.k_norm", RMS))

_WINDOW = (("sliding_window", "sliding_window"),)

MISTRAL = LLAMA.but(layer=_M + "mistral.modeling_mistral.MistralDecoderLayer", attn=dict(passes=_WINDOW))
QWEN2 = LLAMA.but(layer=_M + "qwen2.modeling_qwen2.Qwen2DecoderLayer", attn=dict(passes=_WINDOW))
QWEN3 = QWEN2.but(layer=_M + "qwen3.modeling_qwen3.Qwen3DecoderLayer", attn=_QK_NORM)
GRANITE = LLAMA.but(layer=_M + "granite.modeling_granite.GraniteDecoderLayer", residual_scale="residual_multiplier")
SINKS = dict(sinks=Sinks("self_attn.sinks"), passes=(*_WINDOW, ("s_aux", "sinks")))
GRANITE_SINKS = dict(
    SINKS, sinks=Sinks("self_attn.sinks", in_weights=False), position=Rotary(switch="layer_rope_theta")
)
GRANITE_SWA = GRANITE.but(layer=_M + "granite_swa.modeling_granite_swa.GraniteSWADecoderLayer", attn=GRANITE_SINKS)
SMOLLM3 = LLAMA.but(
    layer=_M + "smollm3.modeling_smollm3.SmolLM3DecoderLayer",
    attn=dict(position=Rotary(switch="no_rope_layers"), passes=_WINDOW),
)

PHI3 = LLAMA.but(
    layer=_M + "phi3.modeling_phi3.Phi3DecoderLayer",
    attn=dict(qkv=Packed("self_attn.qkv_proj"), passes=_WINDOW),
    mlp=PackedGatedMLP(gate_up="mlp.gate_up_proj", down="mlp.down_proj"),
)

GEMMA = LLAMA.but(
    layer=_M + "gemma.modeling_gemma.GemmaDecoderLayer",
    norm1=Norm("input_layernorm", RMS, offset=1.0),
    norm2=Norm("post_attention_layernorm", RMS, offset=1.0),
)
GEMMA2 = GEMMA.but(
    layer=_M + "gemma2.modeling_gemma2.Gemma2DecoderLayer",
    residual=SANDWICH,
    post1=Norm("post_attention_layernorm", RMS, offset=1.0),
    norm2=Norm("pre_feedforward_layernorm", RMS, offset=1.0),
    post2=Norm("post_feedforward_layernorm", RMS, offset=1.0),
    attn=dict(softcap="attn_logit_softcapping", passes=(*_WINDOW, ("softcap", "attn_logit_softcapping"))),
    mlp=dict(activation="hidden_activation"),
)
# Gemma 3 keeps the soft cap attribute, but its attention does not apply it.
GEMMA3 = GEMMA2.but(
    layer=_M + "gemma3.modeling_gemma3.Gemma3DecoderLayer",
    attn=dict(
        softcap=None,
        q_norm=Norm("self_attn.q_norm", RMS, offset=1.0),
        k_norm=Norm("self_attn.k_norm", RMS, offset=1.0),
        passes=_WINDOW,
    ),
)

OLMO2 = LLAMA.but(
    layer=_M + "olmo2.modeling_olmo2.Olmo2DecoderLayer",
    residual=SANDWICH,
    norm1=None,
    norm2=None,
    post1=Norm("post_attention_layernorm", RMS),
    post2=Norm("post_feedforward_layernorm", RMS),
    attn=_QK_NORM,
)

_STABLELM = LLAMA.but(
    layer=_M + "stablelm.modeling_stablelm.StableLmDecoderLayer",
    norm1=Norm("input_layernorm", LAYER),
    attn=dict(q_norm=Norm("self_attn.q_layernorm.norms.*", LAYER), k_norm=Norm("self_attn.k_layernorm.norms.*", LAYER)),
)
STABLELM = _STABLELM.but(
    norm2=Norm("post_attention_layernorm", LAYER), residual=PRE, when=(("use_parallel_residual", False),)
)
STABLELM_PARALLEL = _STABLELM.but(norm2=None, residual=PARALLEL, when=(("use_parallel_residual", True),))

STARCODER2 = MISTRAL.but(
    layer=_M + "starcoder2.modeling_starcoder2.Starcoder2DecoderLayer",
    norm1=Norm("input_layernorm", LAYER),
    norm2=Norm("post_attention_layernorm", LAYER),
    mlp=MLP(up="mlp.c_fc", down="mlp.c_proj"),
)
NEMOTRON = LLAMA.but(
    layer=_M + "nemotron.modeling_nemotron.NemotronDecoderLayer",
    attn=dict(scale=None),  # older releases compute the scale inline, without an attribute
    norm1=Norm("input_layernorm", LAYER, offset=1.0),
    norm2=Norm("post_attention_layernorm", LAYER, offset=1.0),
    mlp=MLP(up="mlp.up_proj", down="mlp.down_proj"),
)
COHERE = LLAMA.but(
    layer=_M + "cohere.modeling_cohere.CohereDecoderLayer",
    residual=PARALLEL,
    norm1=Norm("input_layernorm", LAYER),
    norm2=None,
    attn=dict(
        position=Rotary(interleaved=True),
        q_norm=Norm("self_attn.q_norm", LAYER),
        k_norm=Norm("self_attn.k_norm", LAYER),
    ),
)
PHI = LLAMA.but(
    layer=_M + "phi.modeling_phi.PhiDecoderLayer",
    residual=PARALLEL,
    norm1=Norm("input_layernorm", LAYER),
    norm2=None,
    attn=dict(
        out="self_attn.dense", q_norm=Norm("self_attn.q_layernorm", LAYER), k_norm=Norm("self_attn.k_layernorm", LAYER)
    ),
    mlp=MLP(up="mlp.fc1", down="mlp.fc2"),
)

SPECS = (
    LLAMA, MISTRAL, QWEN2, QWEN3, GRANITE, GRANITE_SWA, SMOLLM3, PHI3, GEMMA, GEMMA2, GEMMA3, OLMO2,
    STABLELM, STABLELM_PARALLEL, STARCODER2, NEMOTRON, COHERE, PHI,
)  # fmt: skip
