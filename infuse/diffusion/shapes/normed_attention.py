"""Attention of diffusers with norms of queries and keys and rotation: LTX-Video, Wan, Hunyuan-DiT.

The norms go over all heads at once or over each head. All its matrices are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from infuse.architectures.bind import Binder
from infuse.architectures.module import ModuleShape, ModuleSpec, class_path
from infuse.architectures.part import Matrix, Parameter, PartShape, named
from infuse.architectures.parts.norm import LAYER, RMS, Norm, NormShape

_TRANSFORMERS = "diffusers.models.transformers."
HUNYUAN = "diffusers.models.attention_processor.HunyuanAttnProcessor2_0"
_LTX, _WAN = f"{_TRANSFORMERS}transformer_ltx.LTX", f"{_TRANSFORMERS}transformer_wan.Wan"
_NORMS: Mapping[type[nn.Module], str] = {nn.RMSNorm: RMS, nn.LayerNorm: LAYER}
_ABSENT = ("group_norm", "spatial_norm", "norm_cross", "add_k_proj", "add_v_proj", "add_q_proj", "to_add_out")


@dataclass(frozen=True)
class NormedAttentionShape(ModuleShape):
    """Self-attention, or cross-attention over a text of `context` columns. `cos_sin` names the rotation's argument.

    `masks`: it takes masks as diffusers' Attention does. `text_cos_sin`: cross-attention rotates only the queries.
    """

    hidden: int
    context: int
    heads: int
    head_width: int
    qkv_bias: bool
    out_bias: bool
    q_norm: NormShape | None
    k_norm: NormShape | None
    cos_sin: str
    masks: bool
    text_cos_sin: bool

    @property
    def own(self) -> tuple[Matrix, ...]:
        width = self.heads * self.head_width
        return (
            Matrix("q", width, self.hidden, self.qkv_bias),
            Matrix("k", width, self.context, self.qkv_bias),
            Matrix("v", width, self.context, self.qkv_bias),
            Matrix("out", self.hidden, width, self.out_bias),
        )

    @property
    def parts(self) -> Mapping[str, PartShape]:
        return {name: norm for name in ("q_norm", "k_norm") if (norm := getattr(self, name)) is not None}

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.own

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (*super().parameters, *(parameter for matrix in self.own for parameter in matrix.parameters))

    @property
    def ops(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*super().ops, "rotary", "attention")))


@dataclass(frozen=True)
class NormedAttention:
    """The attention module with this processor."""

    processor: str
    cos_sin: str
    masks: bool = True
    text_cos_sin: bool = False

    def bind(self, binder: Binder, name: str) -> NormedAttentionShape:
        return self.bind_at(binder, "", name)

    def bind_at(self, binder: Binder, path: str, name: str) -> NormedAttentionShape:
        """Bind the attention at `path`; its tensors go to `name` in the new module."""
        at = partial(named, path)
        module: Any = binder.module(path) if path else binder.layer
        whose = f"{path}'s" if path else "its"
        processor = getattr(module, "processor", None)
        if (processor_class := class_path(processor)) != self.processor:
            expected = self.processor.rpartition(".")[2]
            binder.differ(f"{whose} processor is {processor_class.rpartition('.')[2]}, not {expected}")
        for key in ("_attention_backend", "_parallel_config"):
            if getattr(processor, key, None) is not None:
                binder.differ(f"{whose} processor has {key} {getattr(processor, key)!r}")
        for part in _ABSENT:
            if getattr(module, part, None) is not None:
                binder.differ(f"it has {at(part)}")
        for key in ("fused_projections", "residual_connection"):
            if getattr(module, key, False):
                binder.differ(f"{at(key)} is True")
        if (scale := getattr(module, "rescale_output_factor", 1.0)) != 1.0:
            binder.differ(f"{at('rescale_output_factor')} is {scale}, not 1")
        if [type(layer) for layer in getattr(module, "to_out", None) or ()] != [nn.Linear, nn.Dropout]:
            binder.differ(f"{at('to_out')} is not [Linear, Dropout]")
        paths = at("to_q"), at("to_k"), at("to_v")
        q, k, v = (binder.linear(source) for source in paths)
        out, heads = binder.linear(at("to_out.0")), int(getattr(module, "heads", 0)) or 1
        width = q.rows // heads
        if {q.rows, k.rows, v.rows, out.columns} != {heads * width} or k.columns != v.columns or out.rows != q.columns:
            binder.differ(
                f"q, k, v have {q.rows}, {k.rows}, {v.rows} rows and to_out {out.columns} columns; heads {heads}"
            )
        bias = binder.all_or_no_bias(paths, [q, k, v])
        for target, source in zip(("q", "k", "v"), paths, strict=True):
            binder.fill_linear(named(name, target), (source,), bias)
        binder.fill_linear(named(name, "out"), (at("to_out.0"),), out.bias)
        widths = (width, heads * width)
        norms = [_norm(binder, at(f"norm_{role}"), named(name, f"{role}_norm"), widths) for role in "qk"]
        return NormedAttentionShape(
            q.columns, k.columns, heads, width, bias, out.bias, norms[0], norms[1], self.cos_sin, self.masks,
            self.text_cos_sin,
        )  # fmt: skip


def _norm(binder: Binder, path: str, name: str, widths: tuple[int, ...]) -> NormShape | None:
    """Bind the norm at `path` over one of these widths; None if there is none."""
    norm: Any = binder.module(path, optional=True)
    if norm is None:
        return None
    if type(norm) not in _NORMS or norm.normalized_shape not in [(width,) for width in widths]:
        binder.differ(f"{path} is {norm}, which is not known")
        return None
    return Norm(path, _NORMS[type(norm)]).bind(binder, name)


LTX_ATTENTION = NormedAttention(f"{_LTX}VideoAttnProcessor", "image_rotary_emb")
WAN_ATTENTION = NormedAttention(f"{_WAN}AttnProcessor", "rotary_emb", masks=False)
HUNYUAN_ATTENTION = NormedAttention(HUNYUAN, "image_rotary_emb", text_cos_sin=True)
MODULES = (ModuleSpec(f"{_LTX}Attention", LTX_ATTENTION), ModuleSpec(f"{_WAN}Attention", WAN_ATTENTION))
