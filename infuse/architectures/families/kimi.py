"""Hybrids of Kimi Delta Attention and latent attention, most of whose layers are mixtures.

These layers have specs because a graph has one way through a recurrence, that for the tokens it was made with, and no
part that graphs are read into keeps a state.
"""

from infuse.architectures.families.hybrids import Either
from infuse.architectures.families.llama import LLAMA
from infuse.architectures.families.mixtures import DEEPSEEK_MOE
from infuse.architectures.parts.attention import OutputGate
from infuse.architectures.parts.channel_delta import ChannelDelta
from infuse.architectures.parts.latent_attention import NONE, PAIRS, LatentAttention

_M = "transformers.models."
_KNOWN_BY = ("self_attn.forget_gate", "self_attn.kv_b_proj")

KIMI_LINEAR = LLAMA.but(
    layer=_M + "kimi_linear.modeling_kimi_linear.KimiLinearDecoderLayer",
    attn=Either((ChannelDelta(), LatentAttention(rotation=NONE)), _KNOWN_BY),
    mlp=DEEPSEEK_MOE,
)
# Ling 3. Its latent attention rotates and has a gate for each head.
BAILING_HYBRID = KIMI_LINEAR.but(
    layer=_M + "bailing_hybrid.modeling_bailing_hybrid.BailingHybridDecoderLayer",
    attn=Either(
        (
            ChannelDelta(
                decay=("forget_gate.f_proj",),
                gate=("g_proj",),
                bound="forget_gate.lower_bound",
                bounded="forget_gate.safe_gate",
                rounded=True,
            ),
            LatentAttention(rotation=PAIRS, gate=OutputGate("self_attn.g_proj")),
        ),
        _KNOWN_BY,
    ),
)

SPECS = (KIMI_LINEAR, BAILING_HYBRID)
