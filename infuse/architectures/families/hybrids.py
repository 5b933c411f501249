"""Hybrids: decoders in most of whose layers a state takes the place of keys and values.

These layers have specs because a graph has one way through a recurrence, that for the tokens it was made with, and no
part that graphs are read into keeps a state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from infuse.architectures.families.llama import LLAMA, WINDOW
from infuse.architectures.families.mixtures import GRANITE_MOE_SHARED, QWEN_ROUTER
from infuse.architectures.layer import TUPLE, Mixer
from infuse.architectures.parts.attention import GatedSeparate, OutputGate, Rotary
from infuse.architectures.parts.mlp import GatedMLP, PackedGatedMLP
from infuse.architectures.parts.moe import MoE
from infuse.architectures.parts.norm import RMS, Norm
from infuse.architectures.parts.router import Router
from infuse.architectures.parts.short_conv import ShortConv
from infuse.architectures.parts.state_attention import BETA, GATE, STEP, GatedDelta, K, Q, StateSpace, V
from infuse.architectures.program import SANDWICH
from infuse.ground.activations import Act
from infuse.ground.routing import ACTIVATIONS, FLOAT32, SIGMOID

_M = "transformers.models."


@dataclass(frozen=True)
class Either:
    """The mixer of each layer: the first one whose module the layer has, which is not None.

    `known_by`: for mixers of one path, the paths of the modules that tell them apart. `optional`: layers may have none.
    """

    mixers: tuple[Mixer, ...]
    known_by: tuple[str, ...] = ()
    optional: bool = False

    @property
    def module(self) -> str:
        return self.mixers[0].module

    def of_layer(self, layer: nn.Module, config: Any) -> Mixer | None:
        paths = self.known_by or tuple(mixer.module for mixer in self.mixers)
        there = [mixer for mixer, path in zip(self.mixers, paths, strict=True) if _has(layer, path)]
        if there:
            return there[0].of_layer(layer, config)
        return None if self.optional else self.mixers[-1].of_layer(layer, config)  # which then says what is missing

    def bind(self, binder: Any, name: str) -> Any:
        raise AssertionError("the mixer of a layer is bound")


def _has(layer: nn.Module, path: str) -> bool:
    try:
        layer.get_submodule(path)  # which raises for None, too
    except AttributeError:
        return False
    return True


def _attention(**changes: Any) -> Mixer:
    return LLAMA.but(attn=changes).attn


def _qk_norm(q: str = "q_norm", k: str = "k_norm", offset: float = 0.0) -> dict[str, Norm]:
    return dict(q_norm=Norm(f"self_attn.{q}", RMS, offset), k_norm=Norm(f"self_attn.{k}", RMS, offset))


# ---- short convolutions

_LFM2_MLP = GatedMLP("feed_forward.w1", "feed_forward.w3", "feed_forward.w2", Act("silu"))
LFM2 = LLAMA.but(
    layer=_M + "lfm2.modeling_lfm2.Lfm2DecoderLayer",
    norm1=Norm("operator_norm", RMS),
    attn=Either((ShortConv("conv"), _attention(out="self_attn.out_proj", **_qk_norm("q_layernorm", "k_layernorm")))),
    norm2=Norm("ffn_norm", RMS),
    mlp=_LFM2_MLP,
)
LFM2_ROUTER = Router(
    "feed_forward.gate", score=SIGMOID, rounded_score=True, correction="feed_forward.expert_bias",
    normalise="norm_topk_prob", eps=1e-6, scale="routed_scaling_factor",
)  # fmt: skip
LFM2_MOE = LFM2.but(
    layer=_M + "lfm2_moe.modeling_lfm2_moe.Lfm2MoeDecoderLayer",
    mlp=MoE(LFM2_ROUTER, experts="feed_forward.experts", dense=_LFM2_MLP),
)
LFM3 = LFM2.but(
    layer=_M + "lfm3.modeling_lfm3.Lfm3DecoderLayer",
    residual=SANDWICH,
    attn=Either(
        (ShortConv("conv"), _attention(passes=WINDOW, gate=OutputGate("self_attn.g_proj", optional=True), **_qk_norm()))
    ),
    post1=Norm("post_operator_norm", RMS),
    post2=Norm("post_ffn_norm", RMS),
)

# ---- gated delta rule

_QWEN_ATTENTION = _attention(
    qkv=GatedSeparate("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), **_qk_norm(offset=1.0)
)
_QWEN_MOE = MoE(
    QWEN_ROUTER, shared=GatedMLP.at("mlp.shared_expert"), gate="mlp.shared_expert_gate", dense=GatedMLP.at("mlp")
)
_QWEN = LLAMA.but(norm1=Norm("input_layernorm", RMS, 1.0), norm2=Norm("post_attention_layernorm", RMS, 1.0))
QWEN3_NEXT = _QWEN.but(
    layer=_M + "qwen3_next.modeling_qwen3_next.Qwen3NextDecoderLayer",
    attn=Either(
        (
            GatedDelta(
                "linear_attn", (("in_proj_qkvz", (Q, K, V, GATE)), ("in_proj_ba", (BETA, STEP))), by_key_head=True
            ),
            _QWEN_ATTENTION,
        )
    ),
    mlp=_QWEN_MOE,
)
_QWEN3_5_DELTA = GatedDelta(
    "linear_attn", (("in_proj_qkv", (Q, K, V)), ("in_proj_z", (GATE,)), ("in_proj_b", (BETA,)), ("in_proj_a", (STEP,)))
)
QWEN3_5 = _QWEN.but(
    layer=_M + "qwen3_5.modeling_qwen3_5.Qwen3_5DecoderLayer", attn=Either((_QWEN3_5_DELTA, _QWEN_ATTENTION))
)
QWEN3_5_MOE = QWEN3_5.but(
    layer=_M + "qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeDecoderLayer",
    mlp=replace(_QWEN_MOE, router=replace(QWEN_ROUTER, normalise=True), dense=None),
)
# Attention is Qwen 3's. Layers without a window get no rotary embedding, and the shared expert has no gate.
LARA_MINI = LLAMA.but(
    layer=_M + "lara_mini.modeling_lara_mini.LaraMiniDecoderLayer",
    attn=Either((_QWEN3_5_DELTA, _attention(position=Rotary(optional=True), passes=WINDOW, **_qk_norm()))),
    mlp=MoE(replace(QWEN_ROUTER, logits=FLOAT32, cast=ACTIVATIONS), shared=GatedMLP.at("mlp.shared_expert")),
)
# OLMo Hybrid's two kinds of layers are two classes; those of attention have their norms on the branches.
OLMO_HYBRID = LLAMA.but(
    layer=_M + "olmo_hybrid.modeling_olmo_hybrid.OlmoHybridLinearAttentionDecoderLayer",
    attn=GatedDelta(
        "linear_attn",
        (
            ("q_proj", (Q,)),
            ("k_proj", (K,)),
            ("v_proj", (V,)),
            ("g_proj", (GATE,)),
            ("b_proj", (BETA,)),
            ("a_proj", (STEP,)),
        ),
        norm="o_norm",
        out="o_proj",
        doubles="allow_neg_eigval",
    ),
)
OLMO_HYBRID_ATTENTION = LLAMA.but(
    layer=_M + "olmo_hybrid.modeling_olmo_hybrid.OlmoHybridAttentionDecoderLayer",
    residual=SANDWICH,
    norm1=None,
    attn=dict(position=Rotary(optional=True), **_qk_norm()),
    post1=Norm("post_attention_layernorm", RMS),
    norm2=None,
    post2=Norm("post_feedforward_layernorm", RMS),
)

# ---- state spaces

_MAMBA = Either((StateSpace("mamba"), LLAMA.attn))
BAMBA = LLAMA.but(
    layer=_M + "bamba.modeling_bamba.BambaDecoderLayer",
    returns=TUPLE,
    attn=_MAMBA,
    norm2=Norm("pre_ff_layernorm", RMS),
    mlp=GatedMLP.at("feed_forward"),
)
GRANITE_HYBRID = GRANITE_MOE_SHARED.but(
    layer=_M + "granitemoehybrid.modeling_granitemoehybrid.GraniteMoeHybridDecoderLayer",
    attn=Either((StateSpace("mamba"), _attention(position=Rotary(optional=True)))),
    mlp=dict(dense=PackedGatedMLP("shared_mlp.input_linear", "shared_mlp.output_linear")),
)

SPECS = (
    LFM2,
    LFM2_MOE,
    LFM3,
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_MOE,
    LARA_MINI,
    OLMO_HYBRID,
    OLMO_HYBRID_ATTENTION,
    BAMBA,
    GRANITE_HYBRID,
)
