"""Decoders that read an encoder: attention over its states as a third branch (Vaswani et al. 2017, section 3.2.3).

Keys and values of the states are computed once for an answer; transformers keeps them in the second half of an
EncoderDecoderCache. Their encoders need no spec: their graphs tell all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from infuse.architectures.attention import Attention, Separate
from infuse.architectures.bind import Binder
from infuse.architectures.layer import LayerSpec
from infuse.architectures.mlp import MLP
from infuse.architectures.norm import LAYER, Norm
from infuse.architectures.part import COLUMN, HEADS, ROW, Extent, Matrix, MixerShape, Share
from infuse.architectures.program import ADD, ATTENTION, NORM, NORM_STREAM, Program, Step
from infuse.architectures.program import MLP as MLP_STEP

STATES, STATES_MASK = "encoder_hidden_states", "encoder_attention_mask"
CROSS, CROSS_NORM = "encoder_attn", "cross_norm"  # names of the parts


@dataclass(frozen=True)
class CrossAttention:
    """Attention over STATES with the mask STATES_MASK. `heads` and `scale`: attributes of `module`, or the number.
    `inner`: the module inside it that has these attributes, if it has none itself.
    """

    module: str
    qkv: Separate
    out: str
    heads: str = "num_heads"
    scale: str | float = "scaling"
    inner: str = ""

    def bind(self, binder: Binder, name: str) -> CrossAttentionShape:
        settings = f"{self.module}.{self.inner}" if self.inner else self.module
        heads, paths = binder.own_count(settings, self.heads), (self.qkv.q, self.qkv.k, self.qkv.v, self.out)
        q, k, v, out = (binder.linear(path) for path in paths)
        width = q.rows // heads
        if not q.rows == k.rows == v.rows == out.columns == heads * width:
            binder.differ(f"{', '.join(paths)} are not of {heads} heads of one width")
        if k.columns != v.columns:
            binder.differ(f"{self.qkv.k} and {self.qkv.v} do not read the same states")
        for target, path, linear in zip(("q", "k", "v", "out"), paths, (q, k, v, out), strict=True):
            binder.fill_linear(f"{name}.{target}", (path,), linear.bias)
        return CrossAttentionShape(
            name=name,
            hidden=q.columns,
            states_width=k.columns,
            heads=heads,
            head_width=width,
            biases=(q.bias, k.bias, v.bias, out.bias),
            scale=self._scale(binder, settings, width),
            replaces=(settings, self.module) if self.inner else (self.module,),
        )

    def _scale(self, binder: Binder, settings: str, width: int) -> float:
        found = binder.attribute(settings, self.scale) if isinstance(self.scale, str) else self.scale
        if isinstance(found, (int, float)):
            return float(found)
        binder.differ(f"{self.module}.{self.scale} is {found!r}, not a number")
        return 1 / math.sqrt(max(width, 1))


@dataclass(frozen=True)
class CrossAttentionShape(MixerShape):
    """Dimensions of attention over states of `states_width`; `biases`: of q, k, v and out.

    If ranks share it, the values are one rank's: `first_head` is its first head, `head_counts` are those of every rank.
    """

    name: str
    hidden: int
    states_width: int
    heads: int
    head_width: int
    biases: tuple[bool, bool, bool, bool]
    scale: float
    first_head: int = 0
    head_counts: tuple[int, ...] = ()
    replaces: tuple[str, ...] = ()
    causal: bool = True
    inverted_mask: bool = False
    mask_argument: str = STATES_MASK

    reads_states: ClassVar[bool] = True

    @property
    def all_heads(self) -> int:
        return sum(self.head_counts) or self.heads

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        heads, (q, k, v, out) = Extent(HEADS, self.heads, self.head_width), self.biases
        return (
            Matrix("q", heads.length, self.hidden, q, COLUMN, (heads,)),
            Matrix("k", heads.length, self.states_width, k, COLUMN, (heads,)),
            Matrix("v", heads.length, self.states_width, v, COLUMN, (heads,)),
            Matrix("out", self.hidden, heads.length, out, ROW, (heads,)),
        )

    @property
    def ops(self) -> tuple[str, ...]:
        return ("attention",)

    def of_rank(self, share: Share) -> CrossAttentionShape:
        q, k, v, out = self.biases
        return replace(
            self,
            heads=share.count(HEADS),
            biases=(q, k, v, out and share.is_first),
            first_head=share.own[HEADS][0],
            head_counts=share.counts(HEADS),
        )


_OVER, _ADD, _MLP_STEP = Step(ATTENTION, CROSS, over=STATES), Step(ADD), Step(MLP_STEP, "mlp")


def before_norms(attention: str) -> Program:
    """PRE with the branch of cross attention between those of attention to earlier tokens and of the MLP."""
    return (
        Step(NORM, "norm1"), Step(ATTENTION, attention), _ADD,
        Step(NORM, CROSS_NORM), _OVER, _ADD,
        Step(NORM, "norm2"), _MLP_STEP, _ADD,
    )  # fmt: skip


def after_norms(attention: str) -> Program:
    """POST, likewise."""
    return (
        Step(ATTENTION, attention), _ADD, Step(NORM_STREAM, "norm1"),
        _OVER, _ADD, Step(NORM_STREAM, CROSS_NORM),
        _MLP_STEP, _ADD, Step(NORM_STREAM, "norm2"),
    )  # fmt: skip


_M, _SELF = "transformers.models.", "self_attn"


def _projections(module: str) -> Separate:
    return Separate(f"{module}.q_proj", f"{module}.k_proj", f"{module}.v_proj")


MBART = LayerSpec(
    layer=_M + "mbart.modeling_mbart.MBartDecoderLayer",
    norm1=Norm("self_attn_layer_norm", LAYER),
    attn=Attention(
        module=_SELF,
        qkv=_projections(_SELF),
        out=f"{_SELF}.out_proj",
        heads="decoder_attention_heads",
        kv_heads="decoder_attention_heads",
        scale="scaling",
    ),
    more=(
        (CROSS, CrossAttention(CROSS, _projections(CROSS), f"{CROSS}.out_proj")),
        (CROSS_NORM, Norm("encoder_attn_layer_norm", LAYER)),
    ),
    norm2=Norm("final_layer_norm", LAYER),
    mlp=MLP(up="fc1", down="fc2", activation="activation_function"),
    program=before_norms(_SELF),
    values=(STATES, STATES_MASK),
)
BART = MBART.but(layer=_M + "bart.modeling_bart.BartDecoderLayer", program=after_norms(_SELF))

SPECS = (
    BART,
    BART.but(layer=_M + "plbart.modeling_plbart.PLBartDecoderLayer"),
    BART.but(layer=_M + "marian.modeling_marian.MarianDecoderLayer"),
    BART.but(layer=_M + "blenderbot_small.modeling_blenderbot_small.BlenderbotSmallDecoderLayer"),
    MBART,
    MBART.but(layer=_M + "pegasus.modeling_pegasus.PegasusDecoderLayer"),
    MBART.but(layer=_M + "m2m_100.modeling_m2m_100.M2M100DecoderLayer"),
    MBART.but(layer=_M + "blenderbot.modeling_blenderbot.BlenderbotDecoderLayer"),
    MBART.but(layer=_M + "speech_to_text.modeling_speech_to_text.Speech2TextDecoderLayer"),
    MBART.but(layer=_M + "whisper.modeling_whisper.WhisperDecoderLayer"),
)
