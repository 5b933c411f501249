"""Blocks of diffusion transformers: SD3's joint block, Flux's double and single blocks.

A time step modulates all norms and gates. A joint block has two sequences, image and text, each with its own weights,
and one attention over both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from infuse.architectures.bind import Binder
from infuse.architectures.feed_forward import bind_feed_forward
from infuse.architectures.mlp import MLPShape
from infuse.architectures.module import ModuleShape, ModuleSpec, class_path
from infuse.architectures.packing import Fill
from infuse.architectures.part import (
    COLUMN,
    HEADS,
    INNER,
    KV_HEADS,
    ROW,
    WHOLE,
    Extent,
    Matrix,
    Parameter,
    PartShape,
    Share,
    named,
)

_MODELS = "diffusers.models."
_FLUX = f"{_MODELS}transformers.transformer_flux."
_NORMS = f"{_MODELS}normalization."
ZERO, ZERO_X, CONTINUOUS = "AdaLayerNormZero", "SD35AdaLayerNormZeroX", "AdaLayerNormContinuous"
SINGLE = "AdaLayerNormZeroSingle"
# Vectors that the linear of each modulation makes: shift, scale and gate of attention, then of the MLP, then of the
# second attention; CONTINUOUS makes scale and shift.
VECTORS: Mapping[str, int] = {ZERO: 6, ZERO_X: 9, CONTINUOUS: 2, SINGLE: 3}


@dataclass(frozen=True)
class ModulationShape(PartShape):
    """The linear from the time embedding to all shifts, scales and gates of a block: `outputs` of them, whole."""

    hidden: int
    outputs: int
    bias: bool

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return (Matrix("linear", self.outputs, self.hidden, self.bias, WHOLE, ()),)


@dataclass(frozen=True)
class HeadsShape(PartShape):
    """The projections of one sequence: q, k and v with the norms of q and k, and the output (None: there is none).

    `out` is whether the output has a bias. `beside`: the width of an MLP whose result the output projection takes after
    the heads; its first linear has the bias `up_bias`.
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

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        queries, keys = Extent(HEADS, self.heads, self.head_width), Extent(KV_HEADS, self.heads, self.head_width)
        found = [Matrix("qkv", 3 * queries.length, self.hidden, self.bias, COLUMN, (queries, keys, keys))]
        inputs: tuple[Extent, ...] = (queries,)
        if self.beside:
            inner = Extent(INNER, self.beside)
            found.append(Matrix("up", self.beside, self.hidden, self.up_bias, COLUMN, (inner,)))
            inputs = (queries, inner)
        if self.out is not None:
            width = sum(extent.length for extent in inputs)
            found.append(Matrix("out", self.hidden, width, self.out, ROW, inputs))
        return tuple(found)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        norms = [Parameter(name) for name in ("q_norm", "k_norm") if getattr(self, name)]
        return (*super().parameters, *norms)

    @property
    def ops(self) -> tuple[str, ...]:
        return ("joined_heads", "attention")

    def of_rank(self, share: Share) -> HeadsShape:
        out = self.out if self.out is None else self.out and share.is_first
        beside = share.count(INNER) if self.beside else 0
        return replace(self, heads=share.count(HEADS), out=out, beside=beside)


@dataclass(frozen=True)
class JointShape(ModuleShape):
    """A block of two sequences. `second`: an attention of the image alone, beside the first (SD3.5).

    Without `text_mlp` the text ends in this block. `text_first`: its order in the attention. `turns`: queries and keys
    are rotated. `eps` is that of the modulated norms. `clips`: the text is clamped in float16.
    """

    modulation: ModulationShape
    image: HeadsShape
    text: HeadsShape
    second: HeadsShape | None
    image_mlp: MLPShape
    text_mlp: MLPShape | None
    eps: float
    text_first: bool
    turns: bool
    clips: bool

    @property
    def parts(self) -> Mapping[str, PartShape]:
        held = {name: getattr(self, name) for name in _JOINT_PARTS}
        return {name: part for name, part in held.items() if part is not None}

    @property
    def ops(self) -> tuple[str, ...]:
        return (*super().ops, "modulated_norm", "gated_add", "gated_add_norm")


_JOINT_PARTS = ("modulation", "image", "text", "second", "image_mlp", "text_mlp")


@dataclass(frozen=True)
class SingleShape(ModuleShape):
    """Flux's single block: attention beside an MLP, over text and image as one sequence."""

    modulation: ModulationShape
    image: HeadsShape
    activation: str
    eps: float

    @property
    def parts(self) -> Mapping[str, PartShape]:
        return {"modulation": self.modulation, "image": self.image}

    @property
    def ops(self) -> tuple[str, ...]:
        return (*super().ops, "activation", "modulated_norm", "gated_add")


@dataclass(frozen=True)
class JointBlock:
    """A joint block; `processor` is the class that its attention is computed by."""

    processor: str
    text_first: bool
    turns: bool
    clips: bool

    def bind(self, binder: Binder, name: str) -> JointShape:
        block = binder.layer
        if getattr(block, "_chunk_size", None) is not None:
            binder.differ("its feed-forward runs in chunks")
        second = getattr(block, "attn2", None) is not None
        ends = getattr(binder.module("attn"), "to_add_out", None) is None
        modulation, eps = _modulation(
            binder, {"norm1": ZERO_X if second else ZERO, "norm1_context": CONTINUOUS if ends else ZERO}
        )
        for path in ("norm2", *(() if ends else ("norm2_context",))):
            _check_norm(binder, path, eps)
        return JointShape(
            modulation,
            image=_heads(binder, "attn", "image", self.processor, ("to_q", "to_k", "to_v"), "norm_{}", "to_out.0"),
            text=_heads(
                binder, "attn", "text", self.processor, ("add_q_proj", "add_k_proj", "add_v_proj"), "norm_added_{}",
                None if ends else "to_add_out",
            ),
            second=_heads(binder, "attn2", "second", self.processor, ("to_q", "to_k", "to_v"), "norm_{}", "to_out.0")
            if second
            else None,
            image_mlp=bind_feed_forward(binder, "ff", "image_mlp"),
            text_mlp=None if ends else bind_feed_forward(binder, "ff_context", "text_mlp"),
            eps=eps,
            text_first=self.text_first,
            turns=self.turns,
            clips=self.clips,
        )  # fmt: skip


@dataclass(frozen=True)
class SingleBlock:
    """Flux's single block."""

    processor: str

    def bind(self, binder: Binder, name: str) -> SingleShape:
        modulation, eps = _modulation(binder, {"norm": SINGLE})
        heads = _heads(binder, "attn", "image", self.processor, ("to_q", "to_k", "to_v"), "norm_{}", None)
        up, out = binder.linear("proj_mlp"), binder.linear("proj_out")
        width = heads.heads * heads.head_width
        if out.columns != width + up.rows:
            binder.differ(f"proj_out takes {out.columns} columns; heads and MLP make {width} + {up.rows}")
        binder.fill_linear("image.up", ("proj_mlp",), up.bias)
        binder.fill_linear("image.out", ("proj_out",), out.bias)
        activation = binder.module("act_mlp")
        if type(activation) is not nn.GELU:
            binder.differ(f"act_mlp is a {type(activation).__name__}, not a GELU")
        name = "gelu_tanh" if getattr(activation, "approximate", "") == "tanh" else "gelu"
        return SingleShape(modulation, replace(heads, out=out.bias, beside=up.rows, up_bias=up.bias), name, eps)


def _modulation(binder: Binder, kinds: Mapping[str, str]) -> tuple[ModulationShape, float]:
    """Bind the linears of the modulations at these paths as one; return it and the eps of their norms."""
    linears, epsilons = [], []
    for path, kind in kinds.items():
        found = class_path(binder.module(path))
        if found != f"{_NORMS}{kind}":
            binder.differ(f"{path} is a {found.rpartition('.')[2]}, not {kind}")
        if getattr(binder.module(path), "emb", None) is not None:
            binder.differ(f"{path} embeds the time step itself")
        linear = binder.linear(f"{path}.linear")
        linears.append(linear)
        if linear.rows != VECTORS[kind] * linear.columns:
            binder.differ(f"{path}.linear makes {linear.rows} rows of {linear.columns}, not {VECTORS[kind]} vectors")
        epsilons.append(_check_norm(binder, f"{path}.norm", None))
    if len(set(epsilons)) > 1:
        binder.differ(f"the norms of {' and '.join(kinds)} have different eps: {epsilons}")
    paths = tuple(f"{path}.linear" for path in kinds)
    bias = binder.all_or_no_bias(paths, linears)
    binder.fill_linear("modulation.linear", paths, bias)
    return ModulationShape(linears[0].columns, sum(linear.rows for linear in linears), bias), epsilons[0]


def _check_norm(binder: Binder, path: str, eps: float | None) -> float:
    """The eps of the layer norm without weights at `path`, which must be `eps` if that is given."""
    norm = binder.module(path)
    found = getattr(norm, "eps", 0.0)
    if type(norm) is not nn.LayerNorm or norm.elementwise_affine or (eps is not None and found != eps):
        binder.differ(f"{path} is {norm}, not a LayerNorm without weights{'' if eps is None else f' with eps {eps}'}")
    return found


def _heads(
    binder: Binder, path: str, name: str, processor: str, qkv: tuple[str, str, str], norm: str, out: str | None
) -> HeadsShape:
    """Bind one sequence's projections of the attention at `path`."""
    attn = binder.module(path)
    found = class_path(getattr(attn, "processor", None))
    if found != processor:
        binder.differ(f"{path} is computed by {found.rpartition('.')[2]}, not {processor.rpartition('.')[2]}")
    for key in ("_attention_backend", "_parallel_config"):
        if getattr(attn.processor, key, None) is not None:  # type: ignore[union-attr]
            binder.differ(f"the processor of {path} has {key} {getattr(attn.processor, key)!r}")  # type: ignore[union-attr]
    if getattr(attn, "fused_projections", False):
        binder.differ(f"{path} has fused projections: call unfuse_qkv_projections() first")
    paths = tuple(named(path, one) for one in qkv)
    linears, heads = [binder.linear(one) for one in paths], int(getattr(attn, "heads", 1))
    rows, width = linears[0].rows, linears[0].rows // max(heads, 1)
    if any(linear.rows != heads * width for linear in linears):
        binder.differ(
            f"{', '.join(paths)} have {[one.rows for one in linears]} rows, which {heads} heads do not divide"
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
    norms = {one: _head_norm(binder, named(path, norm.format(one)), named(name, f"{one}_norm"), width) for one in "qk"}
    eps = {found for found in norms.values() if found is not None}
    if len(eps) > 1:
        binder.differ(f"the norms of queries and keys of {path} have different eps: {sorted(eps)}")
    there = {one: found is not None for one, found in norms.items()}
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


MODULES = (
    ModuleSpec(
        f"{_MODELS}attention.JointTransformerBlock",
        JointBlock(f"{_MODELS}attention_processor.JointAttnProcessor2_0", text_first=False, turns=False, clips=False),
    ),
    ModuleSpec(
        f"{_FLUX}FluxTransformerBlock", JointBlock(f"{_FLUX}FluxAttnProcessor", text_first=True, turns=True, clips=True)
    ),
    ModuleSpec(f"{_FLUX}FluxSingleTransformerBlock", SingleBlock(f"{_FLUX}FluxAttnProcessor")),
)
