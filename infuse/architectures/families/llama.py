"""Llama family, as far as it is written: layers whose graphs do not tell all, and what specs of mixtures begin with.

Its other members (Mistral, Qwen, Gemma, Phi, Granite, OLMo, Cohere, ...) are read from their graphs.
"""

from infuse.architectures.layer import LayerSpec
from infuse.architectures.parts.attention import Attention, Rotary, Separate, Sinks
from infuse.architectures.parts.mlp import GatedMLP
from infuse.architectures.parts.norm import LAYER, RMS, Norm
from infuse.architectures.program import PARALLEL, PRE

_M = "transformers.models."

# Its graph tells all of it; it is written because mixtures are, whose routers no graph tells.
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
    mlp=GatedMLP.at("mlp"),
)
QK_NORM = dict(q_norm=Norm("self_attn.q_norm", RMS), k_norm=Norm("self_attn.k_norm", RMS))
WINDOW = (("sliding_window", "sliding_window"),)

# Norms inside attention and MLP, which reading does not know.
BITNET = LLAMA.but(
    layer=_M + "bitnet.modeling_bitnet.BitNetDecoderLayer",
    attn=dict(out_norm=Norm("self_attn.attn_sub_norm", RMS)),
    mlp=dict(norm=Norm("mlp.ffn_sub_norm", RMS)),
)

# The graph has sinks as the gradient of a logarithm of sums: read, they would be another attention.
SINKS = dict(sinks=Sinks("self_attn.sinks"), passes=(*WINDOW, ("s_aux", "sinks")))
GRANITE_SINKS = dict(
    SINKS, sinks=Sinks("self_attn.sinks", in_weights=False), position=Rotary(switch="layer_rope_theta")
)
GRANITE_SWA = LLAMA.but(
    layer=_M + "granite_swa.modeling_granite_swa.GraniteSWADecoderLayer",
    residual_scale="residual_multiplier",
    attn=GRANITE_SINKS,
)

# Queries and keys have a norm module for each head, which the graph applies to slices.
_STABLELM = LLAMA.but(
    layer=_M + "stablelm.modeling_stablelm.StableLmDecoderLayer",
    norm1=Norm("input_layernorm", LAYER),
    attn=dict(q_norm=Norm("self_attn.q_layernorm.norms.*", LAYER), k_norm=Norm("self_attn.k_layernorm.norms.*", LAYER)),
)
STABLELM = _STABLELM.but(
    norm2=Norm("post_attention_layernorm", LAYER), residual=PRE, when=(("use_parallel_residual", False),)
)
STABLELM_PARALLEL = _STABLELM.but(norm2=None, residual=PARALLEL, when=(("use_parallel_residual", True),))

# Queries are multiplied by a function of their positions, which no part that is read computes.
MINISTRAL3 = LLAMA.but(
    layer=_M + "ministral3.modeling_ministral3.Ministral3DecoderLayer", attn=dict(grows=True, passes=WINDOW)
)

SPECS = (LLAMA, BITNET, MINISTRAL3, GRANITE_SWA, STABLELM, STABLELM_PARALLEL)
