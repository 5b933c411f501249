"""BERT family: bidirectional encoders of text and images, without a cache."""

from infuse.architectures.attention import Attention, Packed, Rotary, Separate
from infuse.architectures.layer import LayerSpec
from infuse.architectures.mlp import MLP, PackedGatedMLP
from infuse.architectures.norm import LAYER, Norm
from infuse.architectures.program import POST, PRE

_M = "transformers.models."

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

SPECS = (BERT, ROBERTA, XLM_ROBERTA, ELECTRA, DISTILBERT, ALBERT, MODERNBERT, CLIP, VIT)
