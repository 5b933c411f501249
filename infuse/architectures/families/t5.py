"""T5 family: RMS norms, a learned bias by distance and unscaled scores (Raffel et al. 2020), in both halves.

They are written: the table of the bias is in the first layer, and its rows go through an argument to the others.
"""

from collections.abc import Iterator
from typing import Any

from infuse.architectures.families.encoder_decoder import (
    CROSS,
    CROSS_NORM,
    STATES,
    STATES_MASK,
    CrossAttention,
    before_norms,
)
from infuse.architectures.layer import BIASED, LISTED, SUMS, TENSOR, LayerSpec
from infuse.architectures.parts.attention import Attention, RelativeBias, Separate
from infuse.architectures.parts.mlp import MLP, GatedMLP
from infuse.architectures.parts.moe import MoE
from infuse.architectures.parts.norm import RMS, Norm
from infuse.architectures.parts.router import Top1Router

_M, _ATTENTION, _MLP = "transformers.models.", "layer.0.SelfAttention.", "layer.1.DenseReluDense."
_ACTIVATION = "dense_act_fn"

T5 = LayerSpec(
    layer=_M + "t5.modeling_t5.T5Block",
    norm1=Norm("layer.0.layer_norm", RMS),
    attn=Attention(
        module="layer.0",  # attentions are recorded by the class of the sublayer, not of the attention inside it
        inner="SelfAttention",
        qkv=Separate(_ATTENTION + "q", _ATTENTION + "k", _ATTENTION + "v"),
        out=_ATTENTION + "o",
        position=RelativeBias(_ATTENTION + "relative_attention_bias.weight", "position_bias"),
        scale=1.0,
        causal=False,
    ),
    norm2=Norm("layer.1.layer_norm", RMS),
    mlp=MLP(up=_MLP + "wi", down=_MLP + "wo", activation=_ACTIVATION),
    returns=BIASED,
    clamps=SUMS,
    when=(("is_decoder", False), ("is_gated_act", False)),
)
_OWN_BIAS = dict(position=RelativeBias(_ATTENTION + "relative_attention_bias.weight"))
_STATES, _LAST = "layer.1.EncDecAttention.", "layer.2.DenseReluDense."
_READER = dict(
    attn=dict(causal=True),
    more=(
        (
            CROSS,
            CrossAttention(
                module="layer.1",
                inner="EncDecAttention",
                qkv=Separate(_STATES + "q", _STATES + "k", _STATES + "v"),
                out=_STATES + "o",
                heads="n_heads",
                scale=1.0,
            ),
        ),
        (CROSS_NORM, Norm("layer.1.layer_norm", RMS)),
    ),
    norm2=Norm("layer.2.layer_norm", RMS),
    program=before_norms("layer"),
    values=(STATES, STATES_MASK),
    unread=("encoder_decoder_position_bias",),  # zeros: no layer has a table of distances to states
)


def _like(layer: str, **changes: Any) -> Iterator[LayerSpec]:
    """The specs of a class that differs from T5Block by `changes`: encoder or decoder, plain MLP or gated."""
    own = T5.but(layer=_M + layer, **changes)
    for decodes, mlp in ((False, _MLP), (True, _LAST)):
        half = own.but(**_READER) if decodes else own
        of_mlp = dict(up=mlp + "wi", down=mlp + "wo")
        gated = GatedMLP(gate=mlp + "wi_0", up=mlp + "wi_1", down=mlp + "wo", activation=_ACTIVATION)
        yield half.but(mlp=of_mlp, when=(("is_decoder", decodes), ("is_gated_act", False)))
        yield half.but(mlp=gated, when=(("is_decoder", decodes), ("is_gated_act", True)))


def _decoders(layer: str, **changes: Any) -> Iterator[LayerSpec]:
    """Those of `_like` for decoders, whose layers have a third part."""
    return (spec.but(has="layer.2") for spec in _like(layer, **changes) if ("is_decoder", True) in spec.when)


def _switch(layer: str) -> Iterator[LayerSpec]:
    """Switch Transformers, encoder and decoder: some of its layers have mixtures whose experts drop tokens."""
    own = T5.but(layer=_M + layer)
    for decodes, mlp in ((False, "layer.1.mlp"), (True, "layer.2.mlp")):
        half = own.but(**_READER) if decodes else own
        dense = MLP(up=f"{mlp}.wi", down=f"{mlp}.wo", activation=_ACTIVATION)
        mixture = MoE(Top1Router(f"{mlp}.router"), experts=f"{mlp}.experts", dense=dense)
        yield half.but(mlp=mixture, when=(("is_decoder", decodes),))


# A decoder whose names and returns are its own.
_TEXT, _CROSS, _INNER = "self_attention", "encoder_decoder_attention", ".attention."
PIX2STRUCT = LayerSpec(
    layer=_M + "pix2struct.modeling_pix2struct.Pix2StructTextBlock",
    norm1=Norm(f"{_TEXT}.layer_norm", RMS),
    attn=Attention(
        module=_TEXT,
        inner="attention",
        qkv=Separate(*(_TEXT + _INNER + each for each in ("query", "key", "value"))),
        out=_TEXT + _INNER + "output",
        position=RelativeBias(_TEXT + _INNER + "relative_attention_bias.weight", "position_bias"),
        scale=1.0,
    ),
    more=(
        (CROSS, CrossAttention(
            module=_CROSS,
            inner="attention",
            qkv=Separate(*(_CROSS + _INNER + each for each in ("query", "key", "value"))),
            out=_CROSS + _INNER + "output",
            heads="n_heads",
            scale=1.0,
            cuts_mask=True)),
        (CROSS_NORM, Norm(f"{_CROSS}.layer_norm", RMS)),
    ),
    norm2=Norm("mlp.layer_norm", RMS),
    mlp=GatedMLP("mlp.DenseReluDense.wi_0", "mlp.DenseReluDense.wi_1", "mlp.DenseReluDense.wo", _ACTIVATION),
    program=before_norms(_TEXT),
    values=(STATES, STATES_MASK),
    unread=("encoder_decoder_position_bias",),
    clamps=SUMS,
    cuts_mask=True,
    returns=LISTED,
)  # fmt: skip

SPECS = (
    *_like("t5.modeling_t5.T5Block"),
    *_like("mt5.modeling_mt5.MT5Block"),
    *_like("pop2piano.modeling_pop2piano.Pop2PianoBlock"),
    # Whose encoder looks at parts of a text.
    *_decoders("longt5.modeling_longt5.LongT5Block", returns=LISTED),
    PIX2STRUCT,
    *_switch("switch_transformers.modeling_switch_transformers.SwitchTransformersBlock"),
    *_like("umt5.modeling_umt5.UMT5Block", attn=_OWN_BIAS, returns=TENSOR),
)
