"""Nemotron-H: layers of one part each, a state space, attention, an MLP or a mixture.

These layers have specs because no part that graphs are read into keeps a state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from infuse.architectures.bind import Binder
from infuse.architectures.families.hybrids import Either
from infuse.architectures.families.llama import LLAMA
from infuse.architectures.families.mixtures import DEEPSEEK_ROUTER
from infuse.architectures.layer import LayerSpec
from infuse.architectures.part import PartShape
from infuse.architectures.parts.attention import NoPosition, Separate
from infuse.architectures.parts.mlp import MLP
from infuse.architectures.parts.moe import MoE
from infuse.architectures.parts.norm import RMS, Norm
from infuse.architectures.parts.state_attention import StateSpace
from infuse.architectures.program import ADD, ATTENTION, NORM, Step
from infuse.architectures.program import MLP as MLP_STEP

_MODULE = "mixer"  # of all four kinds
_SPACE, _ATTENTION, _EXPERTS = (f"{_MODULE}.{child}" for child in ("conv1d", "o_proj", "experts"))


@dataclass(frozen=True)
class MLPByKind:
    """The MLP or the mixture of a layer; None for a layer of another kind."""

    mlp: MLP
    moe: MoE

    def bind(self, binder: Binder, name: str) -> PartShape | None:
        space, attention, experts = (binder.module(path, optional=True) for path in (_SPACE, _ATTENTION, _EXPERTS))
        if space is not None or attention is not None:
            return None
        return (self.mlp if experts is None else self.moe).bind(binder, name)


_ATTENTION_MIXER = LLAMA.but(
    attn=dict(
        module=_MODULE,
        qkv=Separate(f"{_MODULE}.q_proj", f"{_MODULE}.k_proj", f"{_MODULE}.v_proj"),
        out=_ATTENTION,
        position=NoPosition(),
    )
).attn
_MLP = MLP(f"{_MODULE}.up_proj", f"{_MODULE}.down_proj", "mlp_hidden_act")
_SHARED = MLP(f"{_MODULE}.shared_experts.up_proj", f"{_MODULE}.shared_experts.down_proj", "mlp_hidden_act")
_ROUTER = replace(DEEPSEEK_ROUTER, module=f"{_MODULE}.gate", correction=f"{_MODULE}.gate.e_score_correction_bias")
_LATENT = (f"{_MODULE}.fc1_latent_proj", f"{_MODULE}.fc2_latent_proj")

NEMOTRON_H = LayerSpec(
    layer="transformers.models.nemotron_h.modeling_nemotron_h.NemotronHBlock",
    attn=Either((StateSpace(_MODULE), _ATTENTION_MIXER), (_SPACE, _ATTENTION), optional=True),
    norm1=Norm("norm", RMS),
    mlp=MLPByKind(_MLP, MoE(_ROUTER, experts=_EXPERTS, shared=_SHARED, latent=_LATENT)),
    program=(Step(NORM, "norm1"), Step(ATTENTION, _MODULE), Step(MLP_STEP, "mlp"), Step(ADD)),
)

SPECS = (NEMOTRON_H,)
