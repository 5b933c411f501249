"""Attention of diffusers over an image or over a text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from infuse.architectures.bind import Binder
from infuse.architectures.module import ModuleShape, ModuleSpec, class_path
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
)
from infuse.diffusion.shapes.normed_attention import HUNYUAN, HUNYUAN_ATTENTION, NormedAttentionShape
from infuse.diffusion.shapes.unet import GroupNormShape, bind_group_norm

_PROCESSORS = "diffusers.models.attention_processor."
ATTENTION_CLASS = f"{_PROCESSORS}Attention"
# Processors that compute softmax(q k^T * scale + mask) v: the scale is 1/sqrt(head width), or the module's own.
_FUSED, _PLAIN = f"{_PROCESSORS}AttnProcessor2_0", f"{_PROCESSORS}AttnProcessor"
_SANA = "diffusers.models.transformers.sana_transformer.SanaAttnProcessor2_0"  # as _FUSED, without norm and residual
_ABSENT = ("norm_q", "norm_k", "norm_cross", "spatial_norm", "add_k_proj", "add_v_proj", "add_q_proj", "to_add_out")


@dataclass(frozen=True)
class ImageAttentionShape(PartShape):
    """Self-attention of pixels of width `hidden` or, if `context` is not 0, cross-attention over a text of that width.

    Self-attention has one matrix for [q | k | v]; cross-attention has one for q and one for [k | v]. `group_norm` runs
    first. `residual`: whether the input is added to the output. The sum is divided by `rescale`.
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
        return (*super().parameters, *(inside("group_norm", parameter) for parameter in norm))

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
    out_linear, *rest = [type(layer) for layer in getattr(module, "to_out", None) or (None,)]
    if out_linear is not nn.Linear or rest not in ([], [nn.Dropout]):
        binder.differ(f"{named(path, 'to_out')} is not [Linear, Dropout]")
    q, k, v, out = (binder.linear(named(path, leaf)) for leaf in ("to_q", "to_k", "to_v", "to_out.0"))
    heads = getattr(module, "heads", 0)
    width = q.rows // heads if heads else 0
    if not heads or {q.rows, k.rows, v.rows, out.columns} != {heads * width}:
        binder.differ(f"q, k, v have {q.rows}, {k.rows}, {v.rows} rows and to_out {out.columns} columns; heads {heads}")
    crosses = bool(getattr(module, "is_cross_attention", False))
    if k.columns != (q.columns if not crosses else v.columns) or v.columns != k.columns:
        binder.differ(f"q, k, v take {q.columns}, {k.columns}, {v.columns} columns")
    merged = (("q", ("to_q",)), ("kv", ("to_k", "to_v"))) if crosses else (("qkv", ("to_q", "to_k", "to_v")),)
    paths = tuple(named(path, leaf) for leaf in ("to_q", "to_k", "to_v"))
    bias = binder.all_or_no_bias(paths, [q, k, v])
    for target, sources in merged:
        binder.fill_linear(named(name, target), tuple(named(path, source) for source in sources), bias)
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
    number = getattr(module, name, None)
    if isinstance(number, (int, float)):
        return float(number)
    binder.differ(f"{name} is {number!r}, not a number")
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


MODULES = (ModuleSpec(ATTENTION_CLASS, ImageAttention()),)
