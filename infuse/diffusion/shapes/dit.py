"""Blocks of diffusion transformers: SD3's joint block, Flux's double and single blocks.

A time step modulates all norms and gates. A joint block has two streams, image and text, each with its own weights, and
one attention over both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from infuse.architectures.bind import Binder
from infuse.architectures.module import ModuleSpec, class_path
from infuse.architectures.packing import Fill
from infuse.architectures.part import (
    COLUMN,
    HEADS,
    INNER,
    KV_HEADS,
    ROW,
    Extent,
    Matrix,
    Parameter,
    PartShape,
    Share,
    named,
)
from infuse.architectures.program import (
    ATTENTION,
    CAT,
    CLIP,
    COS_SIN,
    EMPTY,
    END,
    IMAGE,
    JOINT,
    MLP,
    SPLIT,
    TEXT,
    TIME,
    Program,
    Step,
)
from infuse.diffusion.shapes.feed_forward import bind_feed_forward
from infuse.diffusion.shapes.streams import (
    CONTINUOUS,
    MODULATION,
    SINGLE,
    ZERO,
    ZERO_X,
    StreamsShape,
    bind_modulated_norm,
    bind_modulation,
    gated,
    modulated,
)

_MODELS = "diffusers.models."
_FLUX = f"{_MODELS}transformers.transformer_flux."
_NORMS = f"{_MODELS}normalization."


@dataclass(frozen=True)
class HeadsShape(PartShape):
    """The projections of one sequence: q, k and v with the norms of q and k, and the output projection.

    `out`: whether the output projection has a bias; None without one. `beside`: width of a parallel MLP with
    `activation`; the output projection reads [heads | MLP]. `up_bias`: whether the MLP's first linear has a bias.
    """

    hidden: int
    heads: int
    head_width: int
    bias: bool
    q_norm: bool
    k_norm: bool
    eps: float
    out: bool | None
    beside: int = 0
    up_bias: bool = False
    activation: str = ""

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        queries, keys = Extent(HEADS, self.heads, self.head_width), Extent(KV_HEADS, self.heads, self.head_width)
        matrices = [Matrix("qkv", 3 * queries.length, self.hidden, self.bias, COLUMN, (queries, keys, keys))]
        inputs: tuple[Extent, ...] = (queries,)
        if self.beside:
            inner = Extent(INNER, self.beside)
            matrices.append(Matrix("up", self.beside, self.hidden, self.up_bias, COLUMN, (inner,)))
            inputs = (queries, inner)
        if self.out is not None:
            width = sum(extent.length for extent in inputs)
            matrices.append(Matrix("out", self.hidden, width, self.out, ROW, inputs))
        return tuple(matrices)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        norms = [Parameter(name) for name in ("q_norm", "k_norm") if getattr(self, name)]
        return (*super().parameters, *norms)

    @property
    def ops(self) -> tuple[str, ...]:
        return ("joined_heads", "attention", *(("activation",) if self.beside else ()))

    def of_rank(self, share: Share) -> HeadsShape:
        out = self.out if self.out is None else self.out and share.is_first
        beside = share.count(INNER) if self.beside else 0
        return replace(self, heads=share.count(HEADS), out=out, beside=beside)


_QKV, _ADDED = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")
_TEXT_AND_TIME = (("encoder_hidden_states", TEXT), ("temb", TIME))
# The vectors of a stream: shift, scale and gate of attention, then of the MLP, then of the second attention, which
# reads the block's input as the first one does.
_FIRST: Program = (gated(IMAGE, 2),)
_SECOND: Program = (modulated("norm1", IMAGE, 6), *_FIRST, Step(ATTENTION, "second", on=IMAGE), gated(IMAGE, 8))
_IMAGE_MLP = (modulated("norm2", IMAGE, 3), Step(MLP, "ff", on=IMAGE), gated(IMAGE, 5))
_TEXT_MLP = (modulated("norm2_context", TEXT, 3), Step(MLP, "ff_context", on=TEXT), gated(TEXT, 5))


@dataclass(frozen=True)
class JointBlock:
    """A joint block. `processor`: the class that computes its attention, over the streams in this `order`."""

    layer: str
    processor: str
    order: tuple[str, str]
    call: tuple[tuple[str, str], ...]
    clips: bool = False

    def bind(self, binder: Binder, name: str) -> StreamsShape:
        if getattr(binder.layer, "_chunk_size", None) is not None:
            binder.differ("its feed-forward runs in chunks")
        second = getattr(binder.layer, "attn2", None) is not None
        ends = getattr(binder.module("attn"), "to_add_out", None) is None
        parts = bind_modulation(
            binder,
            {"norm1": (IMAGE, ZERO_X if second else ZERO), "norm1_context": (TEXT, CONTINUOUS if ends else ZERO)},
        )
        parts[IMAGE] = _heads(binder, "attn", IMAGE, self.processor, _QKV, "norm_{}", "to_out.0")
        out = None if ends else "to_add_out"
        parts[TEXT] = _heads(binder, "attn", TEXT, self.processor, _ADDED, "norm_added_{}", out)
        if second:
            parts["second"] = _heads(binder, "attn2", "second", self.processor, _QKV, "norm_{}", "to_out.0")
        for suffix in ("",) if ends else ("", "_context"):
            parts[f"norm2{suffix}"] = bind_modulated_norm(binder, f"norm2{suffix}")
            parts[f"ff{suffix}"] = bind_feed_forward(binder, f"ff{suffix}", f"ff{suffix}")
        text = modulated("norm1_context", TEXT, 0)
        if ends:  # its norm has the scale first
            text, end = text._replace(by=(0, 1)), (Step(END, on=TEXT),)
        else:
            end = (gated(TEXT, 2), *_TEXT_MLP, *((Step(CLIP, on=TEXT),) if self.clips else ()))
        image = (*(_SECOND if second else _FIRST), *_IMAGE_MLP)
        joint = Step(JOINT, on=self.order[0], over=self.order[1])
        program = (MODULATION, modulated("norm1", IMAGE, 0), text, joint, *image, *end)
        return StreamsShape(program, tuple(parts.items()), self.layer, self.call, (TEXT, IMAGE))


@dataclass(frozen=True)
class SingleBlock:
    """Flux's single block: attention beside an MLP, over text and image as one stream."""

    layer: str
    processor: str
    call: tuple[tuple[str, str], ...]
    program: Program = (
        MODULATION,
        Step(CAT, on=IMAGE, over=TEXT),
        modulated("norm", IMAGE, 0),
        Step(ATTENTION, IMAGE, on=IMAGE),
        gated(IMAGE, 2),
        Step(CLIP, on=IMAGE),
        Step(SPLIT, on=IMAGE, over=TEXT),
    )

    def bind(self, binder: Binder, name: str) -> StreamsShape:
        parts = bind_modulation(binder, {"norm": (IMAGE, SINGLE)})
        heads = _heads(binder, "attn", IMAGE, self.processor, _QKV, "norm_{}", None)
        up, out = binder.linear("proj_mlp"), binder.linear("proj_out")
        width = heads.heads * heads.head_width
        if out.columns != width + up.rows:
            binder.differ(f"proj_out takes {out.columns} columns; heads and MLP make {width} + {up.rows}")
        binder.fill_linear(f"{IMAGE}.up", ("proj_mlp",), up.bias)
        binder.fill_linear(f"{IMAGE}.out", ("proj_out",), out.bias)
        activation = binder.module("act_mlp")
        if type(activation) is not nn.GELU:
            binder.differ(f"act_mlp is a {type(activation).__name__}, not a GELU")
        act = "gelu_tanh" if getattr(activation, "approximate", "") == "tanh" else "gelu"
        parts[IMAGE] = replace(heads, out=out.bias, beside=up.rows, up_bias=up.bias, activation=act)
        return StreamsShape(self.program, tuple(parts.items()), self.layer, self.call, (TEXT, IMAGE))


def _heads(
    binder: Binder, path: str, name: str, processor: str, qkv: tuple[str, str, str], norm: str, out: str | None
) -> HeadsShape:
    """Bind one sequence's projections of the attention at `path`."""
    attn = binder.module(path)
    processor_class = class_path(getattr(attn, "processor", None))
    if processor_class != processor:
        binder.differ(f"{path} is computed by {processor_class.rpartition('.')[2]}, not {processor.rpartition('.')[2]}")
    for key in ("_attention_backend", "_parallel_config"):
        if getattr(attn.processor, key, None) is not None:  # type: ignore[union-attr]
            binder.differ(f"the processor of {path} has {key} {getattr(attn.processor, key)!r}")  # type: ignore[union-attr]
    if getattr(attn, "fused_projections", False):
        binder.differ(f"{path} has fused projections: call unfuse_qkv_projections() first")
    paths = tuple(named(path, leaf) for leaf in qkv)
    linears, heads = [binder.linear(p) for p in paths], int(getattr(attn, "heads", 1))
    rows, width = linears[0].rows, linears[0].rows // max(heads, 1)
    if any(linear.rows != heads * width for linear in linears):
        binder.differ(
            f"{', '.join(paths)} have {[linear.rows for linear in linears]} rows, which {heads} heads do not divide"
        )
    bias = binder.all_or_no_bias(paths, linears)
    binder.fill_linear(named(name, "qkv"), paths, bias)
    out_bias: bool | None = None
    if out is not None:
        made = binder.linear(named(path, out))
        binder.fill_linear(named(name, "out"), (named(path, out),), made.bias)
        out_bias = made.bias
        if made.columns != rows:
            binder.differ(f"{named(path, out)} takes {made.columns} columns; the heads make {rows}")
    norms = {
        role: _head_norm(binder, named(path, norm.format(role)), named(name, f"{role}_norm"), width) for role in "qk"
    }
    eps = {norm_eps for norm_eps in norms.values() if norm_eps is not None}
    if len(eps) > 1:
        binder.differ(f"the norms of queries and keys of {path} have different eps: {sorted(eps)}")
    there = {role: norm_eps is not None for role, norm_eps in norms.items()}
    return HeadsShape(linears[0].columns, heads, width, bias, there["q"], there["k"], max(eps, default=0.0), out_bias)


def _head_norm(binder: Binder, path: str, target: str, width: int) -> float | None:
    """Bind the RMS norm over each head at `path` and return its eps; None if there is none."""
    norm = binder.module(path, optional=True)
    if norm is None:
        return None
    if class_path(norm) not in (f"{_NORMS}RMSNorm", "torch.nn.modules.normalization.RMSNorm"):
        binder.differ(f"{path} is a {type(norm).__name__}, not an RMSNorm")
    weight = f"{path}.weight"
    if weight not in binder.parameters or tuple(binder.claim(weight).shape) != (width,):
        binder.differ(f"{path} has no weight of {width} values")
        return None
    binder.fills.append(Fill(target, (weight,)))
    eps = getattr(norm, "eps", None)
    if not isinstance(eps, float):
        binder.differ(f"the eps of {path} is {eps!r}")
        return None
    return eps


_SD3, _SD3_PROCESSOR = (
    f"{_MODELS}attention.JointTransformerBlock",
    f"{_MODELS}attention_processor.JointAttnProcessor2_0",
)
_DOUBLE, _SINGLE, _FLUX_PROCESSOR = (
    f"{_FLUX}{name}" for name in ("FluxTransformerBlock", "FluxSingleTransformerBlock", "FluxAttnProcessor")
)
_SD3_CALL = (*_TEXT_AND_TIME, ("joint_attention_kwargs", EMPTY))
_FLUX_CALL = (*_TEXT_AND_TIME, ("image_rotary_emb", COS_SIN), ("joint_attention_kwargs", EMPTY))
MODULES = (
    ModuleSpec(_SD3, JointBlock("JointTransformerBlock", _SD3_PROCESSOR, (IMAGE, TEXT), _SD3_CALL)),
    ModuleSpec(_DOUBLE, JointBlock("FluxTransformerBlock", _FLUX_PROCESSOR, (TEXT, IMAGE), _FLUX_CALL, clips=True)),
    ModuleSpec(_SINGLE, SingleBlock("FluxSingleTransformerBlock", _FLUX_PROCESSOR, _FLUX_CALL)),
)
