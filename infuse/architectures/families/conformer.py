"""Conformers (Gulati et al. 2020): two halves of a feed-forward around attention and a convolution over time.

x ----+             x ----+             x ----+              x ----+
norm  |             norm  |             norm  |              norm  |
mlp   |             attn  |             conv  |              mlp2  |
 1/2 + --+              + --+               + --+             1/2 + --+   then norm_out

They are written: no part that graphs are read into has convolutions or relative positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import nn

from infuse.architectures.bind import Binder
from infuse.architectures.layer import LayerSpec
from infuse.architectures.packing import Fill
from infuse.architectures.part import (
    COLUMN,
    HEADS,
    KV_HEADS,
    ROW,
    Extent,
    Matrix,
    MixerShape,
    Parameter,
    PartShape,
    Share,
    inside,
    named,
)
from infuse.architectures.parts.attention import Attention, Rotary, Separate
from infuse.architectures.parts.mlp import MLP
from infuse.architectures.parts.norm import LAYER, Norm, NormShape
from infuse.architectures.program import ADD, ATTENTION, NORM, NORM_STREAM, Program, Step
from infuse.architectures.program import MLP as MLP_STEP

BY_VECTOR, BY_TABLE = "by vector", "by table"


@dataclass(frozen=True)
class DistanceVectors:
    """Scores of queries with a key of each distance (Dai et al. 2019, Transformer-XL, section 3.3).

    The layer is called with a vector for each of the distances T - 1, ..., 1 - T in `argument`, of which the linear at
    `keys` makes keys. The parameters at `content` and `distance`, [heads, head width], are added to the queries that
    meet keys of tokens and of distances.
    """

    argument: str
    keys: str
    content: str
    distance: str

    def bind(self, binder: Binder, name: str, heads: int, width: int, hidden: int) -> DistanceShape:
        linear = binder.linear(self.keys)
        if (linear.rows, linear.columns, linear.bias) != (heads * width, hidden, False):
            binder.differ(f"{self.keys} is no matrix {heads * width} x {hidden} without a bias")
        binder.fill_linear(f"{name}.distances", (self.keys,), bias=False)
        for target, path in (("content_bias", self.content), ("distance_bias", self.distance)):
            binder.fill_parameter(f"{name}.{target}", path, (heads, width))
        return DistanceShape(BY_VECTOR, self.argument)


@dataclass(frozen=True)
class DistanceTable:
    """Scores of queries with the row of a table for each distance (Shaw et al. 2018), from -left to right.

    Farther distances have the first or the last row. `left` and `right` are attributes of the attention.
    """

    table: str
    left: str = "left_max_position_embeddings"
    right: str = "right_max_position_embeddings"

    def bind(self, binder: Binder, name: str, heads: int, width: int, hidden: int) -> DistanceShape:
        module = self.table.rpartition(".")[0].rpartition(".")[0]
        found = [binder.attribute(module, each) for each in (self.left, self.right)]
        left, right = (number if isinstance(number, int) else 0 for number in found)
        if found != [left, right]:
            binder.differ(f"{self.left} and {self.right} of {module} are {found}, not two numbers")
        binder.fill_parameter(f"{name}.table", self.table, (left + right + 1, width))
        return DistanceShape(BY_TABLE, left=left, right=right)


@dataclass(frozen=True)
class DistanceShape:
    """Bound DistanceVectors (`kind` BY_VECTOR) or DistanceTable (BY_TABLE)."""

    kind: str
    argument: str = ""
    left: int = 0
    right: int = 0


@dataclass(frozen=True)
class RelativeAttention:
    """Attention in both directions, of the module at `module`, with scores by distance.

    `kv_heads`: a config key, or None for one per query head. `passes_bias`: it passes those scores to its attention
    function as `position_bias`, and not in the mask.
    """

    module: str
    qkv: Separate
    out: str
    distances: DistanceVectors | DistanceTable | None
    kv_heads: str | None = None
    passes_bias: bool = False

    def of_layer(self, layer: nn.Module, config: object) -> RelativeAttention:
        return self

    def bind(self, binder: Binder, name: str) -> RelativeAttentionShape:
        heads = binder.count("num_attention_heads")
        kv_heads = heads if self.kv_heads is None else binder.count(self.kv_heads)
        hidden, width, bias = self.qkv.bind(binder, f"{name}.qkv", heads, kv_heads)
        out = binder.linear(self.out)
        if (out.rows, out.columns) != (hidden, heads * width):
            binder.differ(f"{self.out} is no matrix {hidden} x {heads * width}")
        binder.fill_linear(f"{name}.out", (self.out,), out.bias)
        distances = None if self.distances is None else self.distances.bind(binder, name, heads, width, hidden)
        scale = binder.attribute(self.module, "scaling")
        if not isinstance(scale, float):
            binder.differ(f"{self.module}.scaling is {scale!r}, not a number")
        return RelativeAttentionShape(
            name=name,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_width=width,
            qkv_bias=bias,
            out_bias=out.bias,
            distances=distances,
            scale=scale if isinstance(scale, float) else 1.0,
            passes_bias=self.passes_bias,
            replaces=(self.module,),
        )


@dataclass(frozen=True)
class RelativeAttentionShape(MixerShape):
    """Dimensions and settings of one RelativeAttention. If ranks share it, the values are one rank's, as in
    AttentionShape.
    """

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_width: int
    qkv_bias: bool
    out_bias: bool
    distances: DistanceShape | None
    scale: float
    passes_bias: bool
    replaces: tuple[str, ...] = ()
    causal: bool = False
    inverted_mask: bool = False
    first_head: int = 0
    head_counts: tuple[int, ...] = ()

    @property
    def all_heads(self) -> int:
        return sum(self.head_counts) or self.heads

    @property
    def by_vector(self) -> bool:
        return self.distances is not None and self.distances.kind == BY_VECTOR

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        queries, keys = Extent(HEADS, self.heads, self.head_width), Extent(KV_HEADS, self.kv_heads, self.head_width)
        rows = queries.length + 2 * keys.length
        qkv = Matrix("qkv", rows, self.hidden, self.qkv_bias, COLUMN, (queries, keys, keys))
        out = Matrix("out", self.hidden, queries.length, self.out_bias, ROW, (queries,))
        if not self.by_vector:
            return qkv, out
        return qkv, out, Matrix("distances", queries.length, self.hidden, False, COLUMN, (queries,))

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        if self.by_vector:
            heads = (Extent(HEADS, self.heads),)
            return *super().parameters, Parameter("content_bias", heads), Parameter("distance_bias", heads)
        return (*super().parameters, Parameter("table")) if self.distances is not None else super().parameters

    @property
    def ops(self) -> tuple[str, ...]:
        return ("attention",)

    def of_rank(self, share: Share) -> RelativeAttentionShape:
        return replace(
            self,
            heads=share.count(HEADS),
            kv_heads=share.count(KV_HEADS),
            out_bias=self.out_bias and share.is_first,
            first_head=share.own[HEADS][0],
            head_counts=share.counts(HEADS),
        )


@dataclass(frozen=True)
class BatchNormShape(PartShape):
    """A bound BatchNorm1d, which normalizes by its running statistics."""

    width: int
    eps: float

    tensors: ClassVar = ("weight", "bias", "running_mean", "running_var")

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(Parameter(name) for name in (*self.tensors, "num_batches_tracked"))


@dataclass(frozen=True)
class Convolution:
    """down(act(norm(depthwise(glu(up(x)))))), of the module at `path`; depthwise is a convolution over time.

    `norm`: the name of its batch norm, or of a LayerNorm over channels. `up` and `down` are convolutions of one frame.
    `causal`: the module itself pads before the first frame. Padding is set to zero: the input of `up` (`masks_input`),
    which takes a mask [B, T], or else its output, where no query of the attention's mask sees a frame; `reads_numbers`:
    also one of numbers.
    """

    path: str
    norm: str
    causal: bool = False
    masks_input: bool = False
    reads_numbers: bool = False

    def bind(self, binder: Binder, name: str) -> ConvolutionShape:
        up_path, down_path, depthwise = (
            named(self.path, leaf) for leaf in ("pointwise_conv1", "pointwise_conv2", "depthwise_conv")
        )
        up, down = binder.pointwise(up_path), binder.pointwise(down_path)
        channels = down.columns
        if up.rows != 2 * channels or (down.rows, channels) != (up.columns, up.columns):
            binder.differ(f"{up_path} makes {up.rows} channels of {up.columns}; {down_path} {down.rows} of {channels}")
        for target, path, linear in (("up", up_path, up), ("down", down_path, down)):
            binder.fill_linear(named(name, target), (path,), linear.bias, pointwise=True)
        kernel, left, right = self._frames(binder, depthwise, channels)
        binder.fill_parameter(named(name, "depthwise.weight"), f"{depthwise}.weight", (channels, 1, kernel))
        bias = f"{depthwise}.bias" in binder.parameters
        if bias:
            binder.fill_parameter(named(name, "depthwise.bias"), f"{depthwise}.bias", (channels,))
        return ConvolutionShape(
            channels=channels,
            kernel=kernel,
            left=left,
            right=right,
            activation=binder.activation("hidden_act"),
            up_bias=up.bias,
            depthwise_bias=bias,
            down_bias=down.bias,
            norm=self._norm(binder, named(name, "norm"), channels),
            masks_input=self.masks_input,
            reads_numbers=self.reads_numbers,
        )

    def _frames(self, binder: Binder, path: str, channels: int) -> tuple[int, int, int]:
        """Frames that the convolution at `path` sees: all, those before the present one, and those after it."""
        conv = binder.module(path)
        if not isinstance(conv, nn.Conv1d):
            binder.differ(f"{path} is a {type(conv).__name__}, not a Conv1d")
            return 1, 0, 0
        found = (conv.in_channels, conv.out_channels, conv.groups, conv.stride, conv.dilation, conv.padding_mode)
        wanted = (channels, channels, channels, (1,), (1,), "zeros")
        (kernel,) = conv.kernel_size
        before = (kernel - 1) // 2
        paddings = {"same": (before, kernel - 1 - before), (before,): (before, before)}
        if self.causal:
            paddings = {(0,): (kernel - 1, 0)}
        left, right = paddings.get(conv.padding, (-1, -1))
        if found != wanted or left + right != kernel - 1:
            binder.differ(f"{path} does not make one frame of each, and each channel of itself")
            return kernel, 0, kernel - 1
        return kernel, left, right

    def _norm(self, binder: Binder, name: str, channels: int) -> NormShape | BatchNormShape:
        path = named(self.path, self.norm)
        norm = binder.module(path)
        if not isinstance(norm, nn.BatchNorm1d):
            return Norm(path, LAYER).bind(binder, name) or NormShape(LAYER, channels, 0.0, 0.0, None, False)
        if not norm.affine or norm.running_mean is None:
            binder.differ(f"{path} has no weight or no running statistics")
            return BatchNormShape(channels, norm.eps)
        for leaf in ("weight", "bias"):
            binder.fill_parameter(f"{name}.{leaf}", f"{path}.{leaf}", (channels,))
        leaves = ("running_mean", "running_var", "num_batches_tracked")
        binder.fills.extend(Fill(f"{name}.{leaf}", (f"{path}.{leaf}",)) for leaf in leaves)
        return BatchNormShape(channels, norm.eps)


@dataclass(frozen=True)
class ConvolutionShape(PartShape):
    """Dimensions and settings of a bound Convolution; it is whole on each rank. `left`, `right`: frames of padding."""

    channels: int
    kernel: int
    left: int
    right: int
    activation: str
    up_bias: bool
    depthwise_bias: bool
    down_bias: bool
    norm: NormShape | BatchNormShape
    masks_input: bool
    reads_numbers: bool

    convolves: ClassVar[bool] = True

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        up = Matrix("up", 2 * self.channels, self.channels, self.up_bias)
        return up, Matrix("down", self.channels, self.channels, self.down_bias)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        leaves = ("weight", "bias") if self.depthwise_bias else ("weight",)
        own = [Parameter(named("depthwise", leaf)) for leaf in leaves]
        return (*super().parameters, *own, *(inside("norm", parameter) for parameter in self.norm.parameters))

    @property
    def ops(self) -> tuple[str, ...]:
        return ("activation", *self.norm.ops)


@dataclass(frozen=True)
class Factor:
    """The stream times `number`, which the layer has first in its pair `attribute`, before the factor of a branch."""

    attribute: str
    number: float
    of_branch: float

    def bind(self, binder: Binder, name: str) -> FactorShape:
        found, wanted = binder.attribute("", self.attribute), (self.number, self.of_branch)
        if not isinstance(found, (list, tuple)) or tuple(found) != wanted:
            binder.differ(f"{self.attribute} is {found}; only {wanted} is understood")
        return FactorShape(self.number)


@dataclass(frozen=True)
class FactorShape(PartShape):
    """A bound Factor."""

    number: float


_ATTENTION, _HALF = "self_attn", 0.5
_M = "transformers.models."


def _program(conv: Step, half: tuple[Step, ...] = (), whole: tuple[Step, ...] = ()) -> Program:
    """The steps of a conformer. `half` and `whole`: steps before the feed-forwards and the convolution are added."""
    return (
        *(Step(NORM, "norm1"), Step(MLP_STEP, "mlp"), *half, Step(ADD, scale=_HALF)),
        *(Step(NORM, "norm_attention"), Step(ATTENTION, _ATTENTION), Step(ADD)),
        *(Step(NORM, "norm_conv"), conv, *whole, Step(ADD)),
        *(Step(NORM, "norm2"), Step(MLP_STEP, "mlp2"), *half, Step(ADD, scale=_HALF)),
        Step(NORM_STREAM, "norm_out"),
    )


def _vectors(argument: str, keys: str, content: str, distance: str) -> DistanceVectors:
    return DistanceVectors(argument, *(f"{_ATTENTION}.{leaf}" for leaf in (keys, content, distance)))


PARAKEET = LayerSpec(
    layer=_M + "parakeet.modeling_parakeet.ParakeetEncoderBlock",
    norm1=Norm("norm_feed_forward1", LAYER),
    mlp=MLP(up="feed_forward1.linear1", down="feed_forward1.linear2"),
    attn=RelativeAttention(
        module=_ATTENTION,
        qkv=Separate(*(f"{_ATTENTION}.{name}_proj" for name in "qkv")),
        out=f"{_ATTENTION}.o_proj",
        distances=_vectors("position_embeddings", "relative_k_proj", "bias_u", "bias_v"),
        kv_heads="num_key_value_heads",
    ),
    norm2=Norm("norm_feed_forward2", LAYER),
    more=(
        ("norm_attention", Norm("norm_self_att", LAYER)),
        ("norm_conv", Norm("norm_conv", LAYER)),
        ("conv", Convolution("conv", "norm")),
        ("mlp2", MLP(up="feed_forward2.linear1", down="feed_forward2.linear2")),
        ("norm_out", Norm("norm_out", LAYER)),
    ),
    program=_program(Step(ATTENTION, "conv")),
    values=("position_embeddings",),
)
LASR = PARAKEET.but(
    layer=_M + "lasr.modeling_lasr.LasrEncoderBlock",
    attn=Attention(
        module=_ATTENTION,
        qkv=Separate(*(f"{_ATTENTION}.{name}_proj" for name in "qkv")),
        out=f"{_ATTENTION}.o_proj",
        position=Rotary(),
        kv_heads="num_key_value_heads",
        causal=False,
    ),
    more=(
        *((name, part) for name, part in PARAKEET.more if name != "conv"),
        ("conv", Convolution("conv", "norm", reads_numbers=True)),  # as eager attention gets
        ("more", Factor("feed_forward_residual_weights", 1.5, _HALF)),
        ("twice", Factor("conv_residual_weights", 2.0, 1.0)),
    ),
    program=_program(Step(ATTENTION, "conv"), (Step(NORM_STREAM, "more"),), (Step(NORM_STREAM, "twice"),)),
    values=(),
)
WAV2VEC2_BERT = LayerSpec(
    layer=_M + "wav2vec2_bert.modeling_wav2vec2_bert.Wav2Vec2BertEncoderLayer",
    norm1=Norm("ffn1_layer_norm", LAYER),
    mlp=MLP(up="ffn1.intermediate_dense", down="ffn1.output_dense"),
    attn=RelativeAttention(
        module=_ATTENTION,
        qkv=Separate(*(f"{_ATTENTION}.linear_{name}" for name in "qkv")),
        out=f"{_ATTENTION}.linear_out",
        distances=DistanceTable(f"{_ATTENTION}.distance_embedding.weight"),
        passes_bias=True,
    ),
    norm2=Norm("ffn2_layer_norm", LAYER),
    more=(
        ("norm_attention", Norm("self_attn_layer_norm", LAYER)),
        ("norm_conv", Norm("conv_module.layer_norm", LAYER)),
        ("conv_module", Convolution("conv_module", "depthwise_layer_norm", causal=True, masks_input=True)),
        ("mlp2", MLP(up="ffn2.intermediate_dense", down="ffn2.output_dense")),
        ("norm_out", Norm("final_layer_norm", LAYER)),
    ),
    program=_program(Step(ATTENTION, "conv_module", over="conv_attention_mask")),
    values=("conv_attention_mask",),
    when=(("position_embeddings_type", "relative_key"),),
    repeated=("relative_position_embeddings",),  # which is None
)
WAV2VEC2_BERT_RELATIVE = WAV2VEC2_BERT.but(
    attn=dict(distances=_vectors("relative_position_embeddings", "linear_pos", "pos_bias_u", "pos_bias_v")),
    values=("conv_attention_mask", "relative_position_embeddings"),
    when=(("position_embeddings_type", "relative"),),
    repeated=(),
)
WAV2VEC2_BERT_WITHOUT = WAV2VEC2_BERT.but(attn=dict(distances=None), when=(("position_embeddings_type", None),))

SPECS = (PARAKEET, LASR, WAV2VEC2_BERT, WAV2VEC2_BERT_RELATIVE, WAV2VEC2_BERT_WITHOUT)
