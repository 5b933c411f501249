"""Attention of diffusers over an image or over a text, and the transformer blocks that are made of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from infuse.architectures.bind import Binder
from infuse.architectures.feed_forward import FEED_FORWARD, bind_feed_forward
from infuse.architectures.mlp import MLPShape
from infuse.architectures.module import ModuleShape, ModuleSpec, class_path
from infuse.architectures.norm import LAYER, Norm, NormShape
from infuse.architectures.normed_attention import HUNYUAN, HUNYUAN_ATTENTION, NormedAttentionShape
from infuse.architectures.packing import Fill
from infuse.architectures.part import (
    COLUMN,
    HEADS,
    KV_HEADS,
    ROW,
    Extent,
    Matrix,
    Parameter,
    PartShape,
    Share,
    inside,
    named,
)  # fmt: skip
from infuse.architectures.unet import ConvShape, GroupNormShape, bind_conv, bind_group_norm

_PROCESSORS = "diffusers.models.attention_processor."
_ATTENTION, _BLOCK = f"{_PROCESSORS}Attention", "diffusers.models.attention.BasicTransformerBlock"
BLOCKS = "transformer_blocks"  # the name of the list of blocks
MODULATED = ("modulated_norm", "gated_add", "gated_add_norm")
# The processors that compute softmax(q k^T * scale + mask) v: by the width's root, or by the module's own scale.
_FUSED, _PLAIN = f"{_PROCESSORS}AttnProcessor2_0", f"{_PROCESSORS}AttnProcessor"
_SANA = "diffusers.models.transformers.sana_transformer.SanaAttnProcessor2_0"  # as _FUSED, without norm and residual
_ABSENT = ("norm_q", "norm_k", "norm_cross", "spatial_norm", "add_k_proj", "add_v_proj", "add_q_proj", "to_add_out")


@dataclass(frozen=True)
class ImageAttentionShape(PartShape):
    """Attention of `hidden` wide pixels over themselves or, if `context` is not 0, over a text of that width.

    Over themselves it has one matrix for [q | k | v], over a text one for q and one for [k | v]. `group_norm` comes
    first, then `residual`: whether the input is added to the output, which is divided by `rescale`.
    """

    hidden: int
    context: int
    outputs: int
    heads: int
    head_width: int
    qkv_bias: bool
    out_bias: bool
    scale: float
    group_norm: GroupNormShape | None
    residual: bool
    rescale: float

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        queries, keys = (Extent(unit, self.heads, self.head_width) for unit in (HEADS, KV_HEADS))
        width, bias = queries.length, self.qkv_bias
        out = Matrix("out", self.outputs, width, self.out_bias, ROW, (queries,))
        if not self.context:
            return Matrix("qkv", 3 * width, self.hidden, bias, COLUMN, (queries, keys, keys)), out
        kv = Matrix("kv", 2 * width, self.context, bias, COLUMN, (keys, keys))
        return Matrix("q", width, self.hidden, bias, COLUMN, (queries,)), kv, out

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        norm = () if self.group_norm is None else self.group_norm.parameters
        return (*super().parameters, *(inside("group_norm", one) for one in norm))

    @property
    def ops(self) -> tuple[str, ...]:
        return ("attention",) if self.group_norm is None else ("attention", *self.group_norm.ops)

    def of_rank(self, share: Share) -> ImageAttentionShape:
        return replace(self, heads=share.count(HEADS), out_bias=self.out_bias and share.is_first)


def bind_image_attention(binder: Binder, path: str, name: str) -> ImageAttentionShape:
    """Bind the attention module at `path`; its tensors go to `name` in the new module."""
    module = binder.module(path)
    processor = class_path(getattr(module, "processor", None))
    if processor == _SANA:
        for part in ("group_norm", "residual_connection"):
            if getattr(module, part, None):
                binder.differ(f"it has {named(path, part)}, which {processor.rpartition('.')[2]} leaves out")
    elif processor not in (_FUSED, _PLAIN):
        binder.differ(f"the processor of {path or 'the attention'} is {processor}, which is not known")
    for part in _ABSENT:
        if getattr(module, part, None) is not None:
            binder.differ(f"it has {named(path, part)}")
    out_linear, *rest = [type(one) for one in getattr(module, "to_out", None) or (None,)]
    if out_linear is not nn.Linear or rest not in ([], [nn.Dropout]):
        binder.differ(f"{named(path, 'to_out')} is not [Linear, Dropout]")
    q, k, v, out = (binder.linear(named(path, one)) for one in ("to_q", "to_k", "to_v", "to_out.0"))
    heads = getattr(module, "heads", 0)
    width = q.rows // heads if heads else 0
    if not heads or {q.rows, k.rows, v.rows, out.columns} != {heads * width}:
        binder.differ(f"q, k, v have {q.rows}, {k.rows}, {v.rows} rows and to_out {out.columns} columns; heads {heads}")
    crosses = bool(getattr(module, "is_cross_attention", False))
    if k.columns != (q.columns if not crosses else v.columns) or v.columns != k.columns:
        binder.differ(f"q, k, v take {q.columns}, {k.columns}, {v.columns} columns")
    merged = (("q", ("to_q",)), ("kv", ("to_k", "to_v"))) if crosses else (("qkv", ("to_q", "to_k", "to_v")),)
    paths = tuple(named(path, one) for one in ("to_q", "to_k", "to_v"))
    bias = binder.all_or_no_bias(paths, [q, k, v])
    for target, sources in merged:
        binder.fill_linear(named(name, target), tuple(named(path, one) for one in sources), bias)
    binder.fill_linear(named(name, "out"), (named(path, "to_out.0"),), out.bias)
    norm = None
    if getattr(module, "group_norm", None) is not None:
        norm = bind_group_norm(binder, named(path, "group_norm"), named(name, "group_norm"))
    return ImageAttentionShape(
        hidden=q.columns,
        context=k.columns if crosses else 0,
        outputs=out.rows,
        heads=heads,
        head_width=width,
        qkv_bias=bias,
        out_bias=out.bias,
        scale=1 / math.sqrt(max(width, 1)) if processor in (_FUSED, _SANA) else _number(binder, module, "scale"),
        group_norm=norm,
        residual=bool(getattr(module, "residual_connection", False)),
        rescale=_number(binder, module, "rescale_output_factor"),
    )


def _number(binder: Binder, module: nn.Module | None, name: str) -> float:
    found = getattr(module, name, None)
    if isinstance(found, (int, float)):
        return float(found)
    binder.differ(f"{name} is {found!r}, not a number")
    return 1.0


@dataclass(frozen=True)
class ImageAttentionModuleShape(ModuleShape):
    """An attention module by itself. Its matrices are those of `attention`."""

    attention: ImageAttentionShape

    @property
    def parts(self) -> Mapping[str, PartShape]:
        return {"attention": self.attention}

    def child(self, field: str) -> str:
        return ""


@dataclass(frozen=True)
class ImageAttention:
    """The attention module itself."""

    def bind(self, binder: Binder, name: str) -> ImageAttentionModuleShape | NormedAttentionShape:
        if class_path(getattr(binder.layer, "processor", None)) == HUNYUAN:
            return HUNYUAN_ATTENTION.bind(binder, name)
        return ImageAttentionModuleShape(bind_image_attention(binder, "", name))


@dataclass(frozen=True)
class TransformerBlockShape(ModuleShape):
    """attn1 over the pixels, attn2 over the text (if any), feed-forward; each after a norm, and added to its input.

    `modulated`: norm1, and norm2 before the feed-forward, are scaled and shifted by `scale_shift_table` plus the time
    step, and attn2 has no norm (PixArt). Else norm3 comes before the feed-forward.
    """

    norm1: NormShape
    attn1: ImageAttentionShape
    norm2: NormShape | None
    attn2: ImageAttentionShape | None
    norm3: NormShape | None
    ff: MLPShape
    modulated: bool

    @property
    def parts(self) -> Mapping[str, PartShape]:
        names = ("norm1", "attn1", "norm2", "attn2", "norm3", "ff")
        return {name: part for name in names if (part := getattr(self, name)) is not None}

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (*super().parameters, *([Parameter("scale_shift_table")] if self.modulated else []))

    @property
    def ops(self) -> tuple[str, ...]:
        norms = MODULATED if self.modulated else ("layer_norm", "add_layer_norm")
        return tuple(dict.fromkeys((*super().ops, *norms)))


@dataclass(frozen=True)
class TransformerBlock:
    """BasicTransformerBlock with norms of type "layer_norm" or "ada_norm_single"."""

    def bind(self, binder: Binder, name: str) -> TransformerBlockShape:
        return _bind_block(binder, "")


def _bind_block(binder: Binder, path: str) -> TransformerBlockShape:
    """Bind the transformer block at `path`; its tensors keep their place in the new module."""
    block = binder.module(path) if path else binder.layer
    at = partial(named, path)
    kind = getattr(block, "norm_type", None)
    if kind not in ("layer_norm", "ada_norm_single"):
        binder.differ(f"{at('norm_type')} is {kind!r}, not 'layer_norm' or 'ada_norm_single'")
    for part in ("pos_embed", "fuser"):
        if getattr(block, part, None) is not None:
            binder.differ(f"it has {at(part)}")
    if getattr(block, "only_cross_attention", False):
        binder.differ(f"{at('only_cross_attention')} is True")
    modulated, crosses = kind == "ada_norm_single", getattr(block, "attn2", None) is not None
    if modulated:
        for part in ("norm1", "norm2"):
            if getattr(getattr(block, part, None), "elementwise_affine", False):
                binder.differ(f"{at(part)} has weights beside its modulation")
        binder.claim(at("scale_shift_table"))
        binder.fills.append(Fill(at("scale_shift_table"), (at("scale_shift_table"),)))
    for part, wanted in (("attn1", _ATTENTION), ("attn2", _ATTENTION), ("ff", FEED_FORWARD.layer)):
        if (found := class_path(getattr(block, part, None))) != wanted and (part != "attn2" or crosses):
            binder.differ(f"{at(part)} is a {found.rpartition('.')[2]}, not diffusers' {wanted.rpartition('.')[2]}")
    norm1 = _norm(binder, at("norm1"))
    assert norm1 is not None
    return TransformerBlockShape(
        norm1,
        bind_image_attention(binder, at("attn1"), at("attn1")),
        _norm(binder, at("norm2")) if crosses or modulated else None,
        bind_image_attention(binder, at("attn2"), at("attn2")) if crosses else None,
        None if modulated else _norm(binder, at("norm3")),
        bind_feed_forward(binder, at("ff"), at("ff")),
        modulated,
    )


def _norm(binder: Binder, path: str) -> NormShape | None:
    found = binder.module(path)
    if type(found) is not nn.LayerNorm:
        binder.differ(f"{path} is a {type(found).__name__}, not a LayerNorm")
        return NormShape(LAYER, 1, 0.0, 0.0, None, False)
    return Norm(path, LAYER).bind(binder, path)


@dataclass(frozen=True)
class ImageTransformerShape(ModuleShape):
    """x + proj_out(blocks(proj_in(norm(x)))) over the pixels of an image: diffusers' Transformer2DModel.

    The projections are linears or convolutions of single pixels, which have the same names.
    """

    norm: GroupNormShape
    proj_in: Matrix | ConvShape
    blocks: tuple[TransformerBlockShape, ...]
    proj_out: Matrix | ConvShape

    @property
    def parts(self) -> Mapping[str, PartShape]:
        found: dict[str, PartShape] = {"norm": self.norm}
        for number, block in enumerate(self.blocks):
            found |= {f"{BLOCKS}.{number}.{name}": part for name, part in block.parts.items()}
        return found | {name: one for name, one in self._projections.items() if isinstance(one, PartShape)}

    @property
    def _projections(self) -> dict[str, Matrix | ConvShape]:
        return {"proj_in": self.proj_in, "proj_out": self.proj_out}

    def with_parts(self, parts: Mapping[str, PartShape]) -> ImageTransformerShape:
        blocks = []
        for number, block in enumerate(self.blocks):
            start = f"{BLOCKS}.{number}."
            own = {name.removeprefix(start): part for name, part in parts.items() if name.startswith(start)}
            blocks.append(block.with_parts(own))
        return replace(self, blocks=tuple(blocks))

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return (*super().matrices, *(one for one in self._projections.values() if isinstance(one, Matrix)))

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        linears = [one for one in self._projections.values() if isinstance(one, Matrix)]
        return (*super().parameters, *(parameter for matrix in linears for parameter in matrix.parameters))

    @property
    def ops(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.norm.ops, *(op for block in self.blocks for op in block.ops))))


@dataclass(frozen=True)
class ImageTransformer:
    """Transformer2DModel over the channels of an image, not over patches or codes, of blocks without modulation."""

    def bind(self, binder: Binder, name: str) -> ImageTransformerShape:
        model = binder.layer
        if not getattr(model, "is_input_continuous", False):
            binder.differ("its input is not an image of channels")
        if (tables := getattr(getattr(model, "config", None), "norm_type", "layer_norm")) != "layer_norm":
            binder.differ(f"norm_type is {tables!r}, not 'layer_norm'")
        blocks = [f"{BLOCKS}.{number}" for number in range(len(getattr(model, BLOCKS, ())))]
        for path in blocks:
            if (found := class_path(binder.module(path))) != _BLOCK:
                binder.differ(f"{path} is a {found.rpartition('.')[2]}, not diffusers' BasicTransformerBlock")
        return ImageTransformerShape(
            norm=bind_group_norm(binder, "norm", "norm"),
            proj_in=_projection(binder, "proj_in"),
            blocks=tuple(_bind_block(binder, path) for path in blocks),
            proj_out=_projection(binder, "proj_out"),
        )


def _projection(binder: Binder, path: str) -> Matrix | ConvShape:
    if type(binder.module(path)) is not nn.Linear:
        return bind_conv(binder, path, path, 1)
    found = binder.linear(path)
    binder.fill_linear(path, (path,), found.bias)
    return Matrix(path, found.rows, found.columns, found.bias)


MODULES = (
    ModuleSpec(_ATTENTION, ImageAttention()),
    ModuleSpec(_BLOCK, TransformerBlock()),
    ModuleSpec("diffusers.models.transformers.transformer_2d.Transformer2DModel", ImageTransformer()),
)
