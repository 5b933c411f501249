"""Decoders that read an encoder: attention over its states as a third branch (Vaswani et al. 2017, section 3.2.3).

Keys and values of the states are computed once for an answer; transformers keeps them in the second half of an
EncoderDecoderCache. Their encoders need no spec: their graphs tell all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from infuse.architectures.bind import Binder, FoundLinear
from infuse.architectures.layer import READING, LayerSpec
from infuse.architectures.packing import BLOCKS
from infuse.architectures.part import COLUMN, HEADS, KV_HEADS, ROW, Extent, Matrix, MixerShape, Share
from infuse.architectures.parts.attention import Attention, AttentionShape, Packed, Rotary, Separate
from infuse.architectures.parts.mlp import MLP, GatedMLP, PackedGatedMLP
from infuse.architectures.parts.moe import MoE
from infuse.architectures.parts.norm import LAYER, RMS, Norm
from infuse.architectures.parts.router import Top2Router
from infuse.architectures.program import (
    ADD,
    ATTENTION,
    CLAMP_INFINITE,
    MASK,
    NORM,
    NORM_BRANCH,
    NORM_STREAM,
    PRE,
    SANDWICH,
    Program,
    Step,
    program_of,
)
from infuse.architectures.program import MLP as MLP_STEP
from infuse.parallel.slices import Span

STATES, STATES_MASK = "encoder_hidden_states", "encoder_attention_mask"
MERGED_MASK = "merged_attention_mask"  # over tokens, then states
CROSS, CROSS_NORM = "encoder_attn", "cross_norm"  # names of the parts
# What a batch reads of states of another number of rows: one row is that of all (broadcast), all are dealt out evenly,
# or none are read.
SHARED, DEALT, OWN = "shared", "dealt", "own"


@dataclass(frozen=True)
class PackedKeys:
    """Keys and values in one linear, [k | v], beside that of the queries."""

    q: str
    kv: str


@dataclass(frozen=True)
class CrossAttention:
    """Attention over STATES with the mask STATES_MASK.

    `heads`, `width` (of a head) and `scale`: attributes of `module`, or the number; `width` tells the heads, too. Fewer
    keys than queries are shared. `softcap`: an attribute. `inner`: the module inside it that has these attributes, if
    it has none itself. `passes`: keywords that the module passes to its attention function. `by_name`: False if the
    module computes its scores itself. `masked`: False if it looks at no mask. `rows`: SHARED, DEALT or OWN.
    `cuts_mask`: whether it cuts a mask with more columns than there are states.
    """

    module: str
    qkv: Separate | PackedKeys
    out: str
    heads: str = "num_heads"
    scale: str | float | None = "scaling"
    inner: str = ""
    width: str = ""
    softcap: str = ""
    passes: tuple[str, ...] = ()
    by_name: bool = True
    masked: bool = True
    rows: str = SHARED
    cuts_mask: bool = False

    def bind(self, binder: Binder, name: str) -> CrossAttentionShape:
        settings = f"{self.module}.{self.inner}" if self.inner else self.module
        q, out = binder.linear(self.qkv.q), binder.linear(self.out)
        k, v = self._keys_and_values(binder, name)
        paths = [self.qkv.q, *self._paths(), self.out]
        counted = binder.own_count(settings, self.width or self.heads)
        width = max(counted if self.width else q.rows // max(counted, 1), 1)
        heads, kv_heads = q.rows // width, k.rows // width
        if not (q.rows == out.columns == heads * width and k.rows == v.rows == kv_heads * width):
            binder.differ(f"{', '.join(paths)} are not of heads of {width}")
        if kv_heads == 0 or heads % kv_heads:
            binder.differ(f"{heads} heads of {self.qkv.q} do not share {kv_heads} of keys")
        if k.columns != v.columns:
            binder.differ(f"{' and '.join(self._paths())} do not read the same states")
        for target, path, linear in (("q", self.qkv.q, q), ("out", self.out, out)):
            binder.fill_linear(f"{name}.{target}", (path,), linear.bias)
        return CrossAttentionShape(
            name=name,
            hidden=q.columns,
            states_width=k.columns,
            heads=heads,
            kv_heads=kv_heads,
            head_width=width,
            biases=(q.bias, k.bias, v.bias, out.bias),
            scale=self._scale(binder, settings, width),
            softcap=float(binder.attribute(settings, self.softcap) or 0.0) if self.softcap else 0.0,
            passes=self.passes,
            by_name=self.by_name,
            rows=self.rows,
            cuts_mask=self.cuts_mask,
            mask_argument=STATES_MASK if self.masked else "",
            replaces=(settings, self.module) if self.inner else (self.module,),
        )

    def _paths(self) -> tuple[str, ...]:
        return (self.qkv.kv,) if isinstance(self.qkv, PackedKeys) else (self.qkv.k, self.qkv.v)

    def _keys_and_values(self, binder: Binder, name: str) -> list[FoundLinear]:
        paths = self._paths()
        linears = [binder.linear(path) for path in paths]
        if len(paths) == 2:
            for target, path, linear in zip("kv", paths, linears, strict=True):
                binder.fill_linear(f"{name}.{target}", (path,), linear.bias)
            return linears
        both, half = linears[0], linears[0].rows // 2
        for target, first in (("k", 0), ("v", half)):
            binder.fill_linear(f"{name}.{target}", paths, both.bias, rows=(Span(0, first, first + half),))
        return [replace(both, rows=half)] * 2

    def _scale(self, binder: Binder, settings: str, width: int) -> float:
        if self.scale is None:
            return 1 / math.sqrt(max(width, 1))
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
    kv_heads: int
    head_width: int
    biases: tuple[bool, bool, bool, bool]
    scale: float
    softcap: float = 0.0
    passes: tuple[str, ...] = ()
    by_name: bool = True
    rows: str = SHARED
    cuts_mask: bool = False
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
        heads, keys = Extent(HEADS, self.heads, self.head_width), Extent(KV_HEADS, self.kv_heads, self.head_width)
        q, k, v, out = self.biases
        return (
            Matrix("q", heads.length, self.hidden, q, COLUMN, (heads,)),
            Matrix("k", keys.length, self.states_width, k, COLUMN, (keys,)),
            Matrix("v", keys.length, self.states_width, v, COLUMN, (keys,)),
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
            kv_heads=share.count(KV_HEADS),
            biases=(q, k, v, out and share.is_first),
            first_head=share.own[HEADS][0],
            head_counts=share.counts(HEADS),
        )


@dataclass(frozen=True)
class MergedAttentionShape(AttentionShape):
    """Attention to tokens and to STATES in one softmax with the mask MERGED_MASK: one set of matrices for both."""

    mask_argument: str = MERGED_MASK

    reads_states: ClassVar[bool] = True
    merges: ClassVar[str] = STATES


@dataclass(frozen=True)
class MergedAttention(Attention):
    """Attention to tokens and states at once. Positions, if any, turn the tokens alone."""

    def bind(self, binder: Binder, name: str) -> MergedAttentionShape:
        shape = super().bind(binder, name)
        if shape.norm_after or shape.clip or shape.gate or shape.sinks or shape.window or shape.softcap:
            binder.differ(f"attention to tokens and states is understood without what {self.module} has besides")
        return MergedAttentionShape(**{field.name: getattr(shape, field.name) for field in fields(shape)})


_ADD, _MLP_STEP = Step(ADD), Step(MLP_STEP, "mlp")


def _over(cross: str) -> Step:
    return Step(ATTENTION, cross, over=STATES)


def before_norms(attention: str, cross: str = CROSS) -> Program:
    """PRE with the branch of cross attention between those of attention to earlier tokens and of the MLP."""
    return (
        Step(NORM, "norm1"), Step(ATTENTION, attention), _ADD,
        Step(NORM, CROSS_NORM), _over(cross), _ADD,
        Step(NORM, "norm2"), _MLP_STEP, _ADD,
    )  # fmt: skip


def after_norms(attention: str, cross: str = CROSS) -> Program:
    """POST, likewise."""
    return (
        Step(ATTENTION, attention), _ADD, Step(NORM_STREAM, "norm1"),
        _over(cross), _ADD, Step(NORM_STREAM, CROSS_NORM),
        _MLP_STEP, _ADD, Step(NORM_STREAM, "norm2"),
    )  # fmt: skip


def around_norms(attention: str, cross: str) -> Program:
    """SANDWICH, likewise."""
    return (
        Step(NORM, "norm1"), Step(ATTENTION, attention), Step(NORM_BRANCH, "post1"), _ADD,
        Step(NORM, CROSS_NORM), _over(cross), Step(NORM_BRANCH, "cross_post"), _ADD,
        Step(NORM, "norm2"), _MLP_STEP, Step(NORM_BRANCH, "post2"), _ADD,
    )  # fmt: skip


def _masking(program: Program) -> Program:
    """The program whose MLP is given the layer's mask."""
    return tuple(step._replace(over=MASK) if step.does == MLP_STEP else step for step in program)


_M, _SELF = "transformers.models.", "self_attn"


def _projections(module: str) -> Separate:
    return Separate(f"{module}.q_proj", f"{module}.k_proj", f"{module}.v_proj")


def _cross(module: str, norm: str, kind: str = LAYER, *, out: str = "out_proj", **how: Any) -> dict[str, Any]:
    """The parts of a spec for attention to states at `module`, and the norm beside it."""
    cross = CrossAttention(module, _projections(module), f"{module}.{out}", **how)
    return dict(more=((module, cross), (CROSS_NORM, Norm(norm, kind))), program=before_norms(_SELF, module))


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
    norm2=Norm("final_layer_norm", LAYER),
    mlp=MLP(up="fc1", down="fc2", activation="activation_function"),
    values=(STATES, STATES_MASK),
    **_cross(CROSS, "encoder_attn_layer_norm"),
)
BART = MBART.but(layer=_M + "bart.modeling_bart.BartDecoderLayer", program=after_norms(_SELF))
TROCR = BART.but(
    layer=_M + "trocr.modeling_trocr.TrOCRDecoderLayer",
    attn=dict(by_name=False),
    more=(
        (CROSS, CrossAttention(CROSS, _projections(CROSS), f"{CROSS}.out_proj", by_name=False, rows=DEALT)),
        MBART.more[1],
    ),
    returns=READING,
)
SPEECHT5 = TROCR.but(
    layer=_M + "speecht5.modeling_speecht5.SpeechT5DecoderLayer",
    mlp=dict(up="feed_forward.intermediate_dense", down="feed_forward.output_dense", activation="hidden_act"),
)
_OF_TEXT = dict(heads="num_attention_heads", kv_heads="num_attention_heads")
MUSICGEN = MBART.but(layer=_M + "musicgen.modeling_musicgen.MusicgenDecoderLayer", attn=_OF_TEXT)
_FFN = dict(up="ffn.fc1", down="ffn.fc2")
SEAMLESS = MBART.but(
    layer=_M + "seamless_m4t.modeling_seamless_m4t.SeamlessM4TDecoderLayer",
    norm2=Norm("ffn_layer_norm", LAYER),
    mlp=_FFN,
    **_cross("cross_attention", "cross_attention_layer_norm"),
)
_NLLB_MOE = _M + "nllb_moe.modeling_nllb_moe."
NLLB_MOE = SEAMLESS.but(
    layer=_NLLB_MOE + "NllbMoeDecoderLayer", norm2=Norm("ff_layer_norm", LAYER), clamps=CLAMP_INFINITE
)
# Its layers with a mixture, of decoder and encoder: they give the router their mask.
_MIXTURE: dict[str, Any] = dict(
    mlp=MoE(Top2Router("ffn.router"), experts="ffn.experts", dropout="moe_token_dropout"), has="ffn.experts"
)
NLLB_MOE_MIXTURE = NLLB_MOE.but(program=_masking(NLLB_MOE.program), **_MIXTURE)
NLLB_MOE_ENCODER = MBART.but(
    layer=_NLLB_MOE + "NllbMoeEncoderLayer",
    attn=dict(heads="encoder_attention_heads", kv_heads="encoder_attention_heads", causal=False),
    norm2=Norm("ff_layer_norm", LAYER),
    more=(),
    values=(),
    program=_masking(program_of(PRE, _SELF)),
    clamps=CLAMP_INFINITE,
    **_MIXTURE,
)
_GROUPED = dict(heads="num_attention_heads", kv_heads="num_key_value_heads", out=f"{_SELF}.o_proj")
CANARY = MBART.but(
    layer=_M + "canary.modeling_canary.CanaryDecoderLayer",
    norm1=Norm("input_layernorm", LAYER),
    attn=_GROUPED,
    norm2=Norm("final_layernorm", LAYER),
    mlp=dict(up="mlp.fc1", down="mlp.fc2", activation="hidden_act"),
    **_cross(CROSS, "post_attention_layernorm", out="o_proj", width="head_dim", rows=OWN),
)
MOONSHINE = CANARY.but(
    layer=_M + "moonshine.modeling_moonshine.MoonshineDecoderLayer",
    attn=dict(
        heads="decoder_num_attention_heads",
        kv_heads="decoder_num_key_value_heads",
        position=Rotary(interleaved=True, in_halves=True),
        passes=(("is_causal", "is_causal"),),
    ),
    mlp=PackedGatedMLP("mlp.fc1", "mlp.fc2", "decoder_hidden_act", swapped=True),
    **_cross(CROSS, "post_attention_layernorm", out="o_proj", width="head_dim", passes=("is_causal",), rows=DEALT),
)


def _gemma(path: str) -> Norm:
    return Norm(path, RMS, offset=1.0)


_GEMMA: dict[str, Any] = dict(
    module=_SELF,
    qkv=_projections(_SELF),
    out=f"{_SELF}.o_proj",
    position=Rotary(),
    kv_heads="num_key_value_heads",
    scale="scaling",
)
T5GEMMA = LayerSpec(
    layer=_M + "t5gemma.modeling_t5gemma.T5GemmaDecoderLayer",
    norm1=_gemma("pre_self_attn_layernorm"),
    attn=Attention(
        **_GEMMA,
        softcap="attn_logit_softcapping",
        passes=(("sliding_window", "sliding_window"), ("softcap", "attn_logit_softcapping")),
    ),
    post1=_gemma("post_self_attn_layernorm"),
    norm2=_gemma("pre_feedforward_layernorm"),
    mlp=GatedMLP.at("mlp", "hidden_activation"),
    post2=_gemma("post_feedforward_layernorm"),
    more=(
        ("cross_attn", CrossAttention(
            "cross_attn", _projections("cross_attn"), "cross_attn.o_proj", width="head_dim",
            softcap="attn_logit_softcapping", passes=("sliding_window", "softcap"))),
        (CROSS_NORM, _gemma("pre_cross_attn_layernorm")),
        ("cross_post", _gemma("post_cross_attn_layernorm")),
    ),
    program=around_norms(_SELF, "cross_attn"),
    values=(STATES, STATES_MASK),
)  # fmt: skip
T5GEMMA2 = T5GEMMA.but(
    layer=_M + "t5gemma2.modeling_t5gemma2.T5Gemma2DecoderLayer",
    attn=MergedAttention(**_GEMMA, q_norm=_gemma(f"{_SELF}.q_norm"), k_norm=_gemma(f"{_SELF}.k_norm")),
    residual=SANDWICH,
    more=(),
    program=(),
    values=(STATES, MERGED_MASK),
)
_INNER, _OUTER = "attention.self.", "crossattention.self."
# Layers of BERT that read states: without them they are encoders, which are read from their graphs.
BERT = LayerSpec(
    layer=_M + "bert.modeling_bert.BertLayer",
    norm1=Norm("attention.output.LayerNorm", LAYER),
    attn=Attention(
        module="attention",
        inner="self",
        qkv=Separate(_INNER + "query", _INNER + "key", _INNER + "value"),
        out="attention.output.dense",
        scale=None,
    ),
    norm2=Norm("output.LayerNorm", LAYER),
    mlp=MLP("intermediate.dense", "output.dense"),
    more=(
        ("crossattention", CrossAttention(
            "crossattention", Separate(_OUTER + "query", _OUTER + "key", _OUTER + "value"),
            "crossattention.output.dense", heads="num_attention_heads", inner="self")),
        (CROSS_NORM, Norm("crossattention.output.LayerNorm", LAYER)),
    ),
    program=after_norms("attention", "crossattention"),
    values=(STATES, STATES_MASK),
    has="crossattention",
)  # fmt: skip
# Its layers give the mask of the states under a name that their attention does not read.
BLIP = BERT.but(
    layer=_M + "blip.modeling_blip_text.BlipTextLayer",
    attn=dict(by_name=False, causal=False),
    more=(
        ("crossattention", CrossAttention(
            "crossattention", Separate(_OUTER + "query", _OUTER + "key", _OUTER + "value"),
            "crossattention.output.dense", heads="num_attention_heads", scale=None, inner="self", by_name=False,
            masked=False)),
        (CROSS_NORM, Norm("crossattention.output.LayerNorm", LAYER)),
    ),
    values=(STATES,),
    unread=(STATES_MASK,),
    has="crossattention",
)  # fmt: skip
GPT2 = LayerSpec(
    layer=_M + "gpt2.modeling_gpt2.GPT2Block",
    norm1=Norm("ln_1", LAYER),
    attn=Attention(module="attn", qkv=Packed("attn.c_attn", BLOCKS), out="attn.c_proj"),
    norm2=Norm("ln_2", LAYER),
    mlp=MLP("mlp.c_fc", "mlp.c_proj", "activation_function"),
    transposed=True,
    more=(
        ("crossattention", CrossAttention(
            "crossattention", PackedKeys("crossattention.q_attn", "crossattention.c_attn"), "crossattention.c_proj")),
        (CROSS_NORM, Norm("ln_cross_attn", LAYER)),
    ),
    program=before_norms("attn", "crossattention"),
    values=(STATES, STATES_MASK),
    has="crossattention",
    expect=(("reorder_and_upcast_attn", False),),
)  # fmt: skip
_LIKE_BERT = (
    "bert.modeling_bert.BertLayer", "bert_generation.modeling_bert_generation.BertGenerationLayer",
    "camembert.modeling_camembert.CamembertLayer", "data2vec.modeling_data2vec_text.Data2VecTextLayer",
    "electra.modeling_electra.ElectraLayer", "ernie.modeling_ernie.ErnieLayer", "roberta.modeling_roberta.RobertaLayer",
    "roc_bert.modeling_roc_bert.RoCBertLayer", "xlm_roberta.modeling_xlm_roberta.XLMRobertaLayer",
)  # fmt: skip

SPECS = (
    BART,
    TROCR,
    SPEECHT5,
    BART.but(layer=_M + "plbart.modeling_plbart.PLBartDecoderLayer"),
    BART.but(layer=_M + "marian.modeling_marian.MarianDecoderLayer"),
    TROCR.but(layer=_M + "mvp.modeling_mvp.MvpDecoderLayer"),
    BART.but(layer=_M + "blenderbot_small.modeling_blenderbot_small.BlenderbotSmallDecoderLayer"),
    MBART,
    MBART.but(layer=_M + "pegasus.modeling_pegasus.PegasusDecoderLayer"),
    MBART.but(layer=_M + "pegasus_x.modeling_pegasus_x.PegasusXDecoderLayer"),
    MBART.but(layer=_M + "bigbird_pegasus.modeling_bigbird_pegasus.BigBirdPegasusDecoderLayer"),
    MBART.but(layer=_M + "m2m_100.modeling_m2m_100.M2M100DecoderLayer"),
    MBART.but(layer=_M + "blenderbot.modeling_blenderbot.BlenderbotDecoderLayer"),
    MBART.but(layer=_M + "speech_to_text.modeling_speech_to_text.Speech2TextDecoderLayer"),
    MBART.but(
        layer=_M + "whisper.modeling_whisper.WhisperDecoderLayer",
        **_cross(CROSS, "encoder_attn_layer_norm", rows=DEALT),
    ),
    MUSICGEN,
    SEAMLESS,
    SEAMLESS.but(layer=_M + "seamless_m4t_v2.modeling_seamless_m4t_v2.SeamlessM4Tv2DecoderLayer"),
    NLLB_MOE_MIXTURE,
    NLLB_MOE,
    NLLB_MOE_ENCODER,
    CANARY,
    CANARY.but(layer=_M + "cohere_asr.modeling_cohere_asr.CohereAsrDecoderLayer"),
    MOONSHINE,
    T5GEMMA,
    T5GEMMA2,
    BLIP,
    GPT2,
    *(BERT.but(layer=_M + layer) for layer in _LIKE_BERT),
)
