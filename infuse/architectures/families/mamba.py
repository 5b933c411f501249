"""Selective scans (Mamba-1): Jamba, and models of such layers alone; and those of state spaces alone (Mamba-2).

These layers have specs because a graph has one way through a recurrence, that for the tokens it was made with, and no
part that graphs are read into keeps a state.
"""

from infuse.architectures.families.llama import LLAMA
from infuse.architectures.layer import LayerSpec
from infuse.architectures.parts.attention import NoPosition
from infuse.architectures.parts.mlp import GatedMLP
from infuse.architectures.parts.moe import MoE
from infuse.architectures.parts.norm import RMS, Norm
from infuse.architectures.parts.router import Router
from infuse.architectures.parts.selective_scan import SelectiveScan
from infuse.architectures.parts.state_attention import StateSpace
from infuse.architectures.program import ADD_WIDE, ATTENTION, NORM_NARROWED, Step
from infuse.ground.routing import ACTIVATIONS

_M = "transformers.models."
_NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")

# ---- with attention and mixtures

JAMBA_ROUTER = Router("feed_forward.router", cast=ACTIVATIONS)
JAMBA_ATTENTION = LLAMA.but(
    layer=_M + "jamba.modeling_jamba.JambaAttentionDecoderLayer",
    attn=dict(position=NoPosition()),
    norm2=Norm("pre_ff_layernorm", RMS),
    mlp=MoE(JAMBA_ROUTER, experts="feed_forward.experts", dense=GatedMLP.at("feed_forward")),
)
JAMBA_SCAN = JAMBA_ATTENTION.but(
    layer=_M + "jamba.modeling_jamba.JambaMambaDecoderLayer", attn=SelectiveScan("mamba", _NORMS)
)

# ---- scans alone: no MLP, and sums in float32 if the config says so

MAMBA = LayerSpec(
    layer=_M + "mamba.modeling_mamba.MambaBlock",
    norm1=Norm("norm", RMS),
    attn=SelectiveScan("mixer"),
    mlp=None,
    when=(("residual_in_fp32", False),),
)
_WIDE = dict(
    program=(Step(NORM_NARROWED, "norm1"), Step(ATTENTION, "mixer"), Step(ADD_WIDE)), when=(("residual_in_fp32", True),)
)
FALCON_MAMBA = MAMBA.but(
    layer=_M + "falcon_mamba.modeling_falcon_mamba.FalconMambaBlock", attn=SelectiveScan("mixer", _NORMS)
)
MAMBA2 = MAMBA.but(layer=_M + "mamba2.modeling_mamba2.Mamba2Block", attn=StateSpace("mixer"))

SPECS = (
    JAMBA_ATTENTION,
    JAMBA_SCAN,
    MAMBA,
    MAMBA.but(**_WIDE),
    FALCON_MAMBA,
    FALCON_MAMBA.but(**_WIDE),
    MAMBA2,
    MAMBA2.but(**_WIDE),
)
