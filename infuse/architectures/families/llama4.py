"""Llama 4's text layers: complex rotations, norms after them, queries that grow where nothing is rotated, mixtures.

They are written: no graph tells a mixture. Chunks of attention are in the mask that the model passes.
"""

from __future__ import annotations

from dataclasses import dataclass

from infuse.architectures.bind import Binder
from infuse.architectures.layer import LayerSpec
from infuse.architectures.parts.attention import Attention, Growth, Rotary, Separate
from infuse.architectures.parts.mlp import GatedMLP
from infuse.architectures.parts.moe import MoE
from infuse.architectures.parts.norm import RMS, Norm
from infuse.architectures.parts.router import ScoringRouter

_ATTENTION, _MLP = "self_attn", "feed_forward"


@dataclass(frozen=True)
class GrowingWhereNotRotated(Attention):
    """Attention whose queries grow in layers that do not rotate, by the attributes of its module.

    The position of a token is its index in the cache, and counts from 1 (https://arxiv.org/abs/2501.19399).
    """

    def _growth(self, binder: Binder) -> Growth | None:
        if binder.attribute(self.module, "use_rope") or not binder.attribute(self.module, "attn_temperature_tuning"):
            return None
        beta, every = (binder.attribute(self.module, name) for name in ("attn_scale", "floor_scale"))
        if isinstance(beta, (int, float)) and isinstance(every, (int, float)) and every > 0:
            return Growth(float(beta), float(every), offset=1.0, counted=True)
        binder.differ(f"{self.module} has attn_scale {beta!r} and floor_scale {every!r}, not two numbers")
        return None


_L2 = Norm(f"{_ATTENTION}.qk_norm", RMS)
LLAMA4 = LayerSpec(
    layer="transformers.models.llama4.modeling_llama4.Llama4TextDecoderLayer",
    norm1=Norm("input_layernorm", RMS),
    attn=GrowingWhereNotRotated(
        module=_ATTENTION,
        qkv=Separate(f"{_ATTENTION}.q_proj", f"{_ATTENTION}.k_proj", f"{_ATTENTION}.v_proj"),
        out=f"{_ATTENTION}.o_proj",
        kv_heads="num_key_value_heads",
        position=Rotary(interleaved=True, once=True, is_complex=True, where=("use_rope",)),
        q_norm=_L2,
        k_norm=_L2,
        norm_after=True,
    ),
    norm2=Norm("post_attention_layernorm", RMS),
    mlp=MoE(
        ScoringRouter(f"{_MLP}.router", score=None, rounded_score=True),
        experts=f"{_MLP}.experts",
        shared=GatedMLP.at(f"{_MLP}.shared_expert"),
        dense=GatedMLP.at(_MLP),
        weighs_inputs=True,
    ),
    values=("position_ids",),  # which the layer does not hand on to its attention
)

SPECS = (LLAMA4,)
