"""GPT family: decoders with LayerNorm and a plain MLP whose positions, windows or linears no graph tells.

GPT-2, GPT-BigCode, GPT-NeoX and OPT are read from their graphs.
"""

from infuse.architectures.layer import TUPLE, LayerSpec
from infuse.architectures.packing import FOUR_PARTS, PER_GROUP, PER_HEAD
from infuse.architectures.parts.attention import (
    Alibi,
    Attention,
    NoPosition,
    Packed,
    Rotary,
    RotaryTable,
    Separate,
    Window,
)
from infuse.architectures.parts.mlp import MLP
from infuse.architectures.parts.norm import LAYER, Norm
from infuse.architectures.program import PARALLEL, PRE
from infuse.ground.activations import Act

_M = "transformers.models."

# The window is a buffer that the layer adds to each mask.
GPT_NEO = LayerSpec(
    layer=_M + "gpt_neo.modeling_gpt_neo.GPTNeoBlock",
    norm1=Norm("ln_1", LAYER),
    attn=Attention(
        module="attn.attention",
        qkv=Separate("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
        out="attn.attention.out_proj",
        scale=1.0,
        window=Window("attention_layers", "local", "window_size", "max_position_embeddings"),
    ),
    norm2=Norm("ln_2", LAYER),
    mlp=MLP(up="mlp.c_fc", down="mlp.c_proj", activation="activation_function"),
    returns=TUPLE,
)

# Until transformers 5.24 the layer looks up its rows of a table by positions; since then the model passes them, and the
# layer is read.
GPTJ = LayerSpec(
    layer=_M + "gptj.modeling_gptj.GPTJBlock",
    norm1=Norm("ln_1", LAYER),
    attn=Attention(
        module="attn",
        qkv=Separate("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        out="attn.out_proj",
        position=RotaryTable("attn.embed_positions"),
        scale=None,
    ),
    mlp=MLP(up="mlp.fc_in", down="mlp.fc_out", activation="activation_function"),
    residual=PARALLEL,
    returns=TUPLE,
    takes=("layer_past",),
)
CODEGEN = GPTJ.but(
    layer=_M + "codegen.modeling_codegen.CodeGenBlock", attn=dict(qkv=Packed("attn.qkv_proj", FOUR_PARTS))
)

# ALiBi is an argument whose rows are the heads of all texts.
BLOOM = LayerSpec(
    layer=_M + "bloom.modeling_bloom.BloomBlock",
    norm1=Norm("input_layernorm", LAYER),
    attn=Attention(
        module="self_attention",
        qkv=Packed("self_attention.query_key_value", PER_HEAD),
        out="self_attention.dense",
        position=Alibi("alibi"),
        scale="inv_norm_factor",
    ),
    norm2=Norm("post_attention_layernorm", LAYER),
    mlp=MLP(up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h", activation=Act("gelu_tanh")),
    returns=TUPLE,
    expect=(("apply_residual_connection_post_layernorm", False), ("slow_but_exact", False)),
)

# ALiBi as an argument, and a mask in which True is hidden.
MPT = LayerSpec(
    layer=_M + "mpt.modeling_mpt.MptBlock",
    norm1=Norm("norm_1", LAYER),
    attn=Attention(
        module="attn",
        qkv=Packed("attn.Wqkv"),
        out="attn.out_proj",
        heads="n_heads",
        position=Alibi("position_bias"),
        scale="softmax_scale",
        clip="clip_qkv",
        inverted_mask=True,
    ),
    norm2=Norm("norm_2", LAYER),
    mlp=MLP(up="ffn.up_proj", down="ffn.down_proj", activation=Act("gelu")),
    returns=TUPLE,
)

# Its linears are of a class of their own, which nothing but a spec replaces.
_FALCON = LayerSpec(
    layer=_M + "falcon.modeling_falcon.FalconDecoderLayer",
    norm1=Norm("input_layernorm", LAYER),
    attn=Attention(
        module="self_attention",
        qkv=Packed("self_attention.query_key_value", PER_GROUP),
        out="self_attention.dense",
        position=Rotary(),
        scale="inv_norm_factor",
        kv_heads="num_kv_heads",
    ),
    mlp=MLP(up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h", activation="activation"),
    residual=PARALLEL,
    returns=TUPLE,
)
_NEW, _OLD, _NO_ALIBI = ("new_decoder_architecture", True), ("new_decoder_architecture", False), ("alibi", False)
# 40B and later: grouped heads; separate norms for attention and MLP, or one norm for both.
_TWO_NORMS = dict(norm1=Norm("ln_attn", LAYER), norm2=Norm("ln_mlp", LAYER))
FALCON_TWO_NORMS = _FALCON.but(**_TWO_NORMS, when=(_NEW, _NO_ALIBI, ("num_ln_in_parallel_attn", 2)))
FALCON_ONE_NORM = _FALCON.but(when=(_NEW, _NO_ALIBI, ("num_ln_in_parallel_attn", 1)))
# 7B: one key head, one norm. RW: one key head per query head, serial residual; the model adds ALiBi to the mask and
# also passes it as an argument.
FALCON_7B = _FALCON.but(attn=dict(kv_heads=1), when=(_OLD, ("multi_query", True), ("parallel_attn", True), _NO_ALIBI))
_SERIAL = _FALCON.but(residual=PRE, norm2=Norm("post_attention_layernorm", LAYER))
_RW_HEADS = dict(kv_heads=None, qkv=Packed("self_attention.query_key_value", PER_HEAD))
_RW = (_OLD, ("multi_query", False), ("parallel_attn", False))
FALCON_RW = _SERIAL.but(
    attn=dict(position=NoPosition(), **_RW_HEADS), when=(*_RW, ("alibi", True)), repeated=("alibi",)
)
FALCON_RW_ROTARY = _SERIAL.but(attn=_RW_HEADS, when=(*_RW, _NO_ALIBI))

SPECS = (
    GPT_NEO, GPTJ, CODEGEN, BLOOM, MPT, FALCON_TWO_NORMS, FALCON_ONE_NORM, FALCON_7B, FALCON_RW, FALCON_RW_ROTARY,
)  # fmt: skip
