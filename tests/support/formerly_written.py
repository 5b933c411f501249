"""Specs of families that are read now, as they were written: what readings are compared with."""

from __future__ import annotations

from typing import Any

from torch import nn

from infuse import architectures
from infuse.architectures.families.llama import LLAMA, QK_NORM, WINDOW
from infuse.architectures.layer import LayerSpec
from infuse.architectures.packing import FOUR_PARTS, PER_HEAD
from infuse.architectures.parts.attention import Attention, Packed, Rotary, Separate
from infuse.architectures.parts.mlp import MLP, PackedGatedMLP
from infuse.architectures.parts.norm import LAYER, RMS, Norm
from infuse.architectures.program import PARALLEL, POST, PRE, SANDWICH

_M = "transformers.models."

MISTRAL = LLAMA.but(layer=_M + "mistral.modeling_mistral.MistralDecoderLayer", attn=dict(passes=WINDOW))
QWEN2 = LLAMA.but(layer=_M + "qwen2.modeling_qwen2.Qwen2DecoderLayer", attn=dict(passes=WINDOW))
QWEN3 = QWEN2.but(layer=_M + "qwen3.modeling_qwen3.Qwen3DecoderLayer", attn=QK_NORM)
GRANITE = LLAMA.but(layer=_M + "granite.modeling_granite.GraniteDecoderLayer", residual_scale="residual_multiplier")
SMOLLM3 = LLAMA.but(
    layer=_M + "smollm3.modeling_smollm3.SmolLM3DecoderLayer",
    attn=dict(position=Rotary(switch="no_rope_layers"), passes=WINDOW),
)

PHI3 = LLAMA.but(
    layer=_M + "phi3.modeling_phi3.Phi3DecoderLayer",
    attn=dict(qkv=Packed("self_attn.qkv_proj"), passes=WINDOW),
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
    attn=dict(softcap="attn_logit_softcapping", passes=(*WINDOW, ("softcap", "attn_logit_softcapping"))),
    mlp=dict(activation="hidden_activation"),
)
# Gemma 3 keeps the soft cap attribute, but its attention does not apply it.
GEMMA3 = GEMMA2.but(
    layer=_M + "gemma3.modeling_gemma3.Gemma3DecoderLayer",
    attn=dict(
        softcap=None,
        q_norm=Norm("self_attn.q_norm", RMS, offset=1.0),
        k_norm=Norm("self_attn.k_norm", RMS, offset=1.0),
        passes=WINDOW,
    ),
)

OLMO2 = LLAMA.but(
    layer=_M + "olmo2.modeling_olmo2.Olmo2DecoderLayer",
    residual=SANDWICH,
    norm1=None,
    norm2=None,
    post1=Norm("post_attention_layernorm", RMS),
    post2=Norm("post_feedforward_layernorm", RMS),
    attn=QK_NORM,
)

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

GPT2 = LayerSpec(
    layer=_M + "gpt2.modeling_gpt2.GPT2Block",
    norm1=Norm("ln_1", LAYER),
    attn=Attention(module="attn", qkv=Packed("attn.c_attn"), out="attn.c_proj"),
    norm2=Norm("ln_2", LAYER),
    mlp=MLP(up="mlp.c_fc", down="mlp.c_proj", activation="activation_function"),
    transposed=True,
)
_BIGCODE = GPT2.but(layer=_M + "gpt_bigcode.modeling_gpt_bigcode.GPTBigCodeBlock", transposed=False)
BIGCODE = _BIGCODE.but(when=(("multi_query", True),), attn=dict(kv_heads=1))
BIGCODE_HEADS = _BIGCODE.but(when=(("multi_query", False),), attn=dict(qkv=Packed("attn.c_attn", PER_HEAD)))

GPTJ = LayerSpec(
    layer=_M + "gptj.modeling_gptj.GPTJBlock",
    norm1=Norm("ln_1", LAYER),
    attn=Attention(
        module="attn",
        qkv=Separate("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        out="attn.out_proj",
        position=Rotary(interleaved=True, once=True, sin_first=True),
    ),
    mlp=MLP(up="mlp.fc_in", down="mlp.fc_out", activation="activation_function"),
    residual=PARALLEL,
)
CODEGEN = GPTJ.but(
    layer=_M + "codegen.modeling_codegen.CodeGenBlock", attn=dict(qkv=Packed("attn.qkv_proj", FOUR_PARTS))
)

_NEOX = LayerSpec(
    layer=_M + "gpt_neox.modeling_gpt_neox.GPTNeoXLayer",
    norm1=Norm("input_layernorm", LAYER),
    attn=Attention(
        module="attention", qkv=Packed("attention.query_key_value", PER_HEAD), out="attention.dense", position=Rotary()
    ),
    norm2=Norm("post_attention_layernorm", LAYER),
    mlp=MLP(up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h"),
)
GPT_NEOX = _NEOX.but(residual=PARALLEL, when=(("use_parallel_residual", True),))
GPT_NEOX_SERIAL = _NEOX.but(residual=PRE, when=(("use_parallel_residual", False),))

_OPT = LayerSpec(
    layer=_M + "opt.modeling_opt.OPTDecoderLayer",
    norm1=Norm("self_attn_layer_norm", LAYER),
    attn=Attention(
        module="self_attn",
        qkv=Separate("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out="self_attn.out_proj",
    ),
    norm2=Norm("final_layer_norm", LAYER),
    mlp=MLP(up="fc1", down="fc2", activation="activation_function"),
)
OPT = _OPT.but(residual=PRE, when=(("do_layer_norm_before", True),))
OPT_POST = _OPT.but(residual=POST, when=(("do_layer_norm_before", False),))

BERT = LayerSpec(
    layer=_M + "bert.modeling_bert.BertLayer",
    attn=Attention(
        module="attention.self",
        qkv=Separate("attention.self.query", "attention.self.key", "attention.self.value"),
        out="attention.output.dense",
        causal=False,
    ),
    norm1=Norm("attention.output.LayerNorm", LAYER),
    mlp=MLP(up="intermediate.dense", down="output.dense"),
    norm2=Norm("output.LayerNorm", LAYER),
    residual=POST,
)
ROBERTA = BERT.but(layer=_M + "roberta.modeling_roberta.RobertaLayer")
XLM_ROBERTA = BERT.but(layer=_M + "xlm_roberta.modeling_xlm_roberta.XLMRobertaLayer")
ELECTRA = BERT.but(layer=_M + "electra.modeling_electra.ElectraLayer")

DISTILBERT = LayerSpec(
    layer=_M + "distilbert.modeling_distilbert.TransformerBlock",
    attn=Attention(
        module="attention",
        qkv=Separate("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        out="attention.out_lin",
        causal=False,
    ),
    norm1=Norm("sa_layer_norm", LAYER),
    mlp=MLP(up="ffn.lin1", down="ffn.lin2", activation="activation"),
    norm2=Norm("output_layer_norm", LAYER),
    residual=POST,
)
ALBERT = LayerSpec(
    layer=_M + "albert.modeling_albert.AlbertLayer",
    attn=Attention(
        module="attention",
        qkv=Separate("attention.query", "attention.key", "attention.value"),
        out="attention.dense",
        causal=False,
    ),
    norm1=Norm("attention.LayerNorm", LAYER),
    mlp=MLP(up="ffn", down="ffn_output"),
    norm2=Norm("full_layer_layer_norm", LAYER),
    residual=POST,
)
# The first layer's attention norm is an Identity: binding detects it, the spec does not declare it.
MODERNBERT = LayerSpec(
    layer=_M + "modernbert.modeling_modernbert.ModernBertEncoderLayer",
    norm1=Norm("attn_norm", LAYER),
    attn=Attention(
        module="attn",
        qkv=Packed("attn.Wqkv"),
        out="attn.Wo",
        position=Rotary(),
        scale=None,
        causal=False,
        passes=(("sliding_window", "sliding_window"), ("deterministic", "deterministic_flash_attn")),
    ),
    norm2=Norm("mlp_norm", LAYER),
    mlp=PackedGatedMLP(gate_up="mlp.Wi", down="mlp.Wo", activation="hidden_activation"),
    residual=PRE,
)

CLIP = LayerSpec(
    layer=_M + "clip.modeling_clip.CLIPEncoderLayer",
    norm1=Norm("layer_norm1", LAYER),
    attn=Attention(
        module="self_attn",
        qkv=Separate("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out="self_attn.out_proj",
        scale="scale",
        causal=False,
    ),
    norm2=Norm("layer_norm2", LAYER),
    mlp=MLP(up="mlp.fc1", down="mlp.fc2"),
)
VIT = LayerSpec(
    layer=_M + "vit.modeling_vit.ViTLayer",
    norm1=Norm("layernorm_before", LAYER),
    attn=Attention(
        module="attention",
        qkv=Separate("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        out="attention.o_proj",
        causal=False,
    ),
    norm2=Norm("layernorm_after", LAYER),
    mlp=MLP(up="mlp.fc1", down="mlp.fc2"),
)


SPECS = tuple(spec for name, spec in globals().items() if isinstance(spec, LayerSpec) and not name.startswith("_"))


def specs_for(layer: nn.Module) -> tuple[LayerSpec, ...]:
    """The specs that a layer's class has, or had."""
    cls: Any = type(layer)
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in cls.__mro__]
    return architectures.specs_for(layer) or tuple(spec for spec in SPECS if spec.layer in names)
