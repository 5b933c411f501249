"""Falcon-H1: attention and a state space side by side, from one norm, with multipliers everywhere.

These layers have specs because no part that graphs are read into keeps a state.
"""

from dataclasses import replace

from infuse.architectures.families.llama import LLAMA
from infuse.architectures.layer import SINGLE
from infuse.architectures.parts.mlp import GatedMLP
from infuse.architectures.parts.multipliers import Multipliers
from infuse.architectures.parts.norm import RMS, Norm
from infuse.architectures.parts.state_attention import StateSpace
from infuse.architectures.program import ADD, ATTENTION, NORM, Step
from infuse.architectures.program import MLP as MLP_STEP

_MASK = "mamba_attention_mask"
_GATE_AND_VALUES, _KEYS_AND_QUERIES = ("mamba.intermediate_size",) * 2, ("mamba.groups_time_state_size",) * 2
_OF_SPACE = Multipliers(
    "mamba.ssm_in_multiplier",
    after="ssm_out_multiplier",
    listed="ssm_multipliers",
    held="mamba.mup_vector",
    widths=(*_GATE_AND_VALUES, *_KEYS_AND_QUERIES, "mamba.num_heads"),
)
_OF_KEYS = ("", "self_attn.key_multiplier", "")
_OF_GATE = ("feed_forward.gate_multiplier", "")

FALCON_H1 = LLAMA.but(
    layer="transformers.models.falcon_h1.modeling_falcon_h1.FalconH1DecoderLayer",
    attn=dict(multipliers=Multipliers("attention_in_multiplier", _OF_KEYS, "attn_out_multiplier")),
    norm2=Norm("pre_ff_layernorm", RMS),
    mlp=replace(
        GatedMLP.at("feed_forward"), multipliers=Multipliers(sections=_OF_GATE, after="feed_forward.down_multiplier")
    ),
    more=(("mamba", StateSpace("mamba", multipliers=_OF_SPACE, mask=_MASK, beside=True)),),
    program=(
        Step(NORM, "norm1"),
        Step(ATTENTION, "mamba"),
        Step(ATTENTION, "self_attn"),
        Step(ADD),
        Step(NORM, "norm2"),
        Step(MLP_STEP, "mlp"),
        Step(ADD),
    ),
    values=(_MASK,),
    returns=SINGLE,
)

SPECS = (FALCON_H1,)
