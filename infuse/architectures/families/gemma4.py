"""Gemma 4's text layers: shared keys and values, values with a norm, an input for each layer, a scalar.

They are written: what a layer takes from another goes through an argument, which no graph of one layer tells.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from infuse.architectures.bind import Binder
from infuse.architectures.layer import LayerSpec
from infuse.architectures.packing import Fill
from infuse.architectures.part import Matrix, Parameter, PartShape, named
from infuse.architectures.parts.attention import SHARED_STATES, Attention, Lender, Queries, Rotary, Separate
from infuse.architectures.parts.mlp import GatedMLP
from infuse.architectures.parts.moe import MoE
from infuse.architectures.parts.norm import RMS, Norm
from infuse.architectures.parts.router import NormedRouter
from infuse.architectures.program import ADD, ATTENTION, MLP, NORM, NORM_BRANCH, NORM_STREAM, Step

_M, _ATTENTION = "transformers.models.", "self_attn"
PER_LAYER = "per_layer_input"


@dataclass(frozen=True)
class SharingAttention(Attention):
    """Attention of a layer that makes its keys and values, may lend them to later layers, or borrows them.

    Without a linear of values, they are the keys before norm and rotation.
    """

    def of_layer(self, layer: Any, config: Any) -> Attention:
        attention: Any = layer.get_submodule(self.module)
        q, k, v = (f"{self.module}.{name}_proj" for name in "qkv")
        kv_heads = config.num_attention_heads // attention.num_key_value_groups
        own = replace(self, kv_heads=kv_heads)
        if getattr(attention, "is_kv_shared_layer", False):
            lender = Lender(attention.layer_type, _lender(config, attention.layer_type))
            return replace(own, qkv=Queries(q), borrows=lender, k_norm=None, v_norm=None)
        lends = attention.layer_type if getattr(attention, "store_full_length_kv", False) else ""
        return replace(own, qkv=Separate(q, k, k if getattr(attention, "v_proj", v) is None else v), lends=lends)


def _lender(config: Any, kind: str) -> int:
    """The layer whose keys and values those of this type borrow."""
    lenders = config.layer_types[: config.num_hidden_layers - config.num_kv_shared_layers]
    return max((index for index, each in enumerate(lenders) if each == kind), default=-1)


@dataclass(frozen=True)
class PerLayerInput:
    """projection(act(gate(x)) * input of this layer), of the argument PER_LAYER."""

    gate: str = "per_layer_input_gate"
    projection: str = "per_layer_projection"
    activation: str = "hidden_activation"

    def bind(self, binder: Binder, name: str) -> PerLayerInputShape:
        gate, projection = binder.linear(self.gate), binder.linear(self.projection)
        for target, path, linear in (("gate", self.gate, gate), ("projection", self.projection, projection)):
            binder.fill_linear(named(name, target), (path,), linear.bias)
        if (projection.rows, projection.columns) != (gate.columns, gate.rows):
            binder.differ(f"{self.projection} does not take what {self.gate} makes")
        return PerLayerInputShape(
            gate.columns, gate.rows, binder.activation(self.activation), gate.bias, projection.bias
        )


@dataclass(frozen=True)
class PerLayerInputShape(PartShape):
    """Widths and settings of a bound PerLayerInput; it is whole on each rank."""

    hidden: int
    width: int
    activation: str
    gate_bias: bool
    out_bias: bool

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return (
            Matrix("gate", self.width, self.hidden, self.gate_bias),
            Matrix("projection", self.hidden, self.width, self.out_bias),
        )

    @property
    def ops(self) -> tuple[str, ...]:
        return ("activation",)


@dataclass(frozen=True)
class LayerScalar:
    """x times the one number in the layer's buffer at `path`."""

    path: str

    def bind(self, binder: Binder, name: str) -> LayerScalarShape:
        buffer = dict(binder.layer.named_buffers()).get(self.path)
        if buffer is None or tuple(buffer.shape) != (1,):
            binder.differ(f"{self.path} is no buffer of one number")
        binder.fills.append(Fill(f"{name}.scalar", (self.path,)))
        return LayerScalarShape()


@dataclass(frozen=True)
class LayerScalarShape(PartShape):
    """A bound LayerScalar."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (Parameter("scalar"),)


_ATTEND = (Step(NORM, "norm1"), Step(ATTENTION, _ATTENTION), Step(NORM_BRANCH, "post1"), Step(ADD))
_FEED_FORWARD = (Step(NORM, "norm2"), Step(MLP, "mlp"))
_ADD = (Step(NORM_BRANCH, "post2"), Step(ADD))
_PROGRAM = (*_ATTEND, *_FEED_FORWARD, *_ADD)
_WITH_EXPERTS = (
    *_ATTEND, *_FEED_FORWARD, Step(NORM_BRANCH, "post_mlp"), Step(NORM), Step(MLP, "experts"), *_ADD,
)  # fmt: skip
_OF_THIS_LAYER = (Step(ATTENTION, PER_LAYER, over=PER_LAYER), Step(NORM_BRANCH, "post3"), Step(ADD))
_SCALED = Step(NORM_STREAM, "scalar")

GEMMA4_UNIFIED = LayerSpec(
    layer=_M + "gemma4_unified.modeling_gemma4_unified.Gemma4UnifiedTextDecoderLayer",
    norm1=Norm("input_layernorm", RMS),
    attn=SharingAttention(
        module=_ATTENTION,
        qkv=Queries(f"{_ATTENTION}.q_proj"),
        out=f"{_ATTENTION}.o_proj",
        position=Rotary(),
        q_norm=Norm(f"{_ATTENTION}.q_norm", RMS),
        k_norm=Norm(f"{_ATTENTION}.k_norm", RMS),
        v_norm=Norm(f"{_ATTENTION}.v_norm", RMS),
        passes=(("sliding_window", "sliding_window"),),
    ),
    post1=Norm("post_attention_layernorm", RMS),
    norm2=Norm("pre_feedforward_layernorm", RMS),
    mlp=GatedMLP.at("mlp", "hidden_activation"),
    post2=Norm("post_feedforward_layernorm", RMS),
    more=(("scalar", LayerScalar("layer_scalar")),),
    program=(*_PROGRAM, _SCALED),
    values=(SHARED_STATES,),
)
GEMMA4_DENSE = GEMMA4_UNIFIED.but(
    layer=_M + "gemma4.modeling_gemma4.Gemma4TextDecoderLayer",
    when=(("hidden_size_per_layer_input", 0),),
    values=(SHARED_STATES, PER_LAYER),  # which is None
)
GEMMA4 = GEMMA4_DENSE.but(
    when=(),
    more=(*GEMMA4_UNIFIED.more, (PER_LAYER, PerLayerInput()), ("post3", Norm("post_per_layer_input_norm", RMS))),
    program=(*_PROGRAM, *_OF_THIS_LAYER, _SCALED),
)
_EXPERTS = (
    ("post_mlp", Norm("post_feedforward_layernorm_1", RMS)),
    ("experts", MoE(
        NormedRouter("router", "proj.weight", "proj.bias", normalise=True, top_k="config.top_k_experts"), "experts",
        norm=Norm("pre_feedforward_layernorm_2", RMS), post=Norm("post_feedforward_layernorm_2", RMS),
    )),
)  # fmt: skip
GEMMA4_EXPERTS = GEMMA4.but(
    when=(("enable_moe_block", True),),
    more=(*GEMMA4.more, *_EXPERTS),
    program=(*_WITH_EXPERTS, *_OF_THIS_LAYER, _SCALED),
)
GEMMA4_EXPERTS_ALONE = GEMMA4_DENSE.but(
    when=(("enable_moe_block", True), *GEMMA4_DENSE.when),
    more=(*GEMMA4_DENSE.more, *_EXPERTS),
    program=(*_WITH_EXPERTS, _SCALED),
)

_BLOCK = "ple_block."
EMBEDDING_GEMMA2 = GEMMA4.but(
    layer=_M + "embedding_gemma2.modeling_embedding_gemma2.EmbeddingGemma2EncoderLayer",
    more=(
        *GEMMA4_UNIFIED.more,
        (PER_LAYER, PerLayerInput(_BLOCK + "per_layer_input_gate", _BLOCK + "per_layer_projection")),
        ("post3", Norm(_BLOCK + "post_per_layer_input_norm", RMS)),
    ),
    values=(PER_LAYER,),
)

SPECS = (GEMMA4_EXPERTS_ALONE, GEMMA4_EXPERTS, GEMMA4_DENSE, GEMMA4, GEMMA4_UNIFIED, EMBEDDING_GEMMA2)
