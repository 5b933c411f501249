"""T5 family: encoders with RMS norms, a learned bias by distance and unscaled scores (Raffel et al. 2020).

They are written: the table of the bias is in the first layer, and its rows go through an argument to the others.
Decoder blocks have cross attention and are not described here.
"""

from infuse.architectures.attention import Attention, RelativeBias, Separate
from infuse.architectures.layer import BIASED, TENSOR, LayerSpec
from infuse.architectures.mlp import MLP, GatedMLP
from infuse.architectures.norm import RMS, Norm

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
    when=(("is_gated_act", False),),
    expect=(("is_decoder", False),),
)
T5_GATED = T5.but(
    mlp=GatedMLP(gate=_MLP + "wi_0", up=_MLP + "wi_1", down=_MLP + "wo", activation=_ACTIVATION),
    when=(("is_gated_act", True),),
)
_OWN_BIAS = dict(position=RelativeBias(_ATTENTION + "relative_attention_bias.weight"))


def _like(layer: str, **changes: object) -> tuple[LayerSpec, LayerSpec]:
    """The two specs of a class that differs from T5Block by `changes`."""
    return T5.but(layer=_M + layer, **changes), T5_GATED.but(layer=_M + layer, **changes)


SPECS = (
    T5,
    T5_GATED,
    *_like("mt5.modeling_mt5.MT5Block"),
    *_like("umt5.modeling_umt5.UMT5Block", attn=_OWN_BIAS, returns=TENSOR),
)
