"""Encoders whose scores have a bias by distance: MPNet's comes from the model, DeBERTa's from queries and keys.

They are written: no part that graphs are read into takes a bias of the scores, or has projections of distances.
"""

from infuse.architectures.layer import SINGLE, TUPLE, LayerSpec
from infuse.architectures.parts.attention import Attention, PassedScores, Separate
from infuse.architectures.parts.disentangled import Disentangled, DisentangledShape
from infuse.architectures.parts.mlp import MLP
from infuse.architectures.parts.norm import LAYER, Norm
from infuse.architectures.program import POST

_M = "transformers.models."
_SELF = "attention.self."

MPNET = LayerSpec(
    layer=_M + "mpnet.modeling_mpnet.MPNetLayer",
    attn=Attention(
        module="attention.attn",
        qkv=Separate("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        out="attention.attn.o",
        position=PassedScores("position_bias"),
        scale=None,
        causal=False,
        by_name=False,
    ),
    norm1=Norm("attention.LayerNorm", LAYER),
    mlp=MLP(up="intermediate.dense", down="output.dense", activation="hidden_act"),
    norm2=Norm("output.LayerNorm", LAYER),
    residual=POST,
    returns=SINGLE,
)
DEBERTA_V2 = MPNET.but(
    layer=_M + "deberta_v2.modeling_deberta_v2.DebertaV2Layer",
    attn=dict(
        module="attention.self",
        qkv=Separate(_SELF + "query_proj", _SELF + "key_proj", _SELF + "value_proj"),
        out="attention.output.dense",
        position=Disentangled(keys=_SELF + "pos_key_proj", queries=_SELF + "pos_query_proj"),
    ),
    norm1=Norm("attention.output.LayerNorm", LAYER),
    returns=TUPLE,
    values=DisentangledShape.values,
)

SPECS = (MPNET, DEBERTA_V2)
