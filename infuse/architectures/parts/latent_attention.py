"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1): its declaration, binding and shape.

The cache holds one latent and one rotated key for each token, which all heads share. A head's plain key and its value
are products of the latent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import nn

from infuse.architectures.bind import Binder
from infuse.architectures.part import COLUMN, HEADS, ROW, Extent, Matrix, MixerShape, Parameter, Share, inside
from infuse.architectures.parts.attention import GateShape, Growth, NoPosition, OutputGate, Position, Rotary
from infuse.architectures.parts.norm import RMS, Norm, NormShape
from infuse.ground.errors import SpecMismatch

# Rotations. HALVES: pairs (i, i + E/2). PAIRS: pairs (2i, 2i + 1), whose results are at i and i + E/2. COMPLEX: pairs
# (2i, 2i + 1) in float32, in place; the model passes one complex tensor [B or 1, T, E/2] instead of (cos, sin).
# NONE: no positions, though heads still share a part of the keys.
HALVES, PAIRS, COMPLEX, NONE = "halves", "pairs", "complex", "none"


@dataclass(frozen=True)
class LatentAttention:
    """Latent attention with transformers' names in the module at the path `module`.

    `rotation`: HALVES, PAIRS, COMPLEX or NONE; None: the config's `rope_interleave` chooses PAIRS or HALVES.
    `grows`: rotated queries are multiplied by a factor that grows with the position (Llama 4's, Mistral 4).
    `gate`: a gate of the heads before the last matrix.
    """

    module: str = "self_attn"
    rotation: str | None = None
    grows: bool = False
    gate: OutputGate | None = None

    def of_layer(self, layer: nn.Module, config: object) -> LatentAttention:
        if hasattr(layer.get_submodule(self.module), "indexer"):
            text = f"{self.module}.indexer chooses the keys that each query sees; the attention stays as it is"
            raise SpecMismatch(type(layer).__name__, [text])
        return self

    def bind(self, binder: Binder, name: str) -> LatentAttentionShape:
        heads, latent = binder.count("num_attention_heads"), binder.count("kv_lora_rank")
        plain, rotated = binder.count("qk_nope_head_dim"), binder.count("qk_rope_head_dim")
        value = binder.count("v_head_dim")
        compressed = binder.attribute(self.module, "q_lora_rank") is not None
        hidden, a_bias, rank = self._linear(binder, "kv_a_proj_with_mqa", f"{name}.kv_a", latent + rotated)
        q_rank, q_bias, q_norm = 0, False, None
        if compressed:
            _, q_bias, q_rank = self._linear(binder, "q_a_proj", f"{name}.q_a")
            q_norm = Norm(f"{self.module}.q_a_layernorm", RMS).bind(binder, f"{name}.q_norm")
        self._linear(binder, "q_b_proj" if compressed else "q_proj", f"{name}.q", heads * (plain + rotated), False)
        kv_norm = Norm(f"{self.module}.kv_a_layernorm", RMS).bind(binder, f"{name}.kv_norm")
        self._linear(binder, "kv_b_proj", f"{name}.kv_b", heads * (plain + value), False)
        _, out_bias, _ = self._linear(binder, "o_proj", f"{name}.out", hidden)
        return LatentAttentionShape(
            name=name,
            hidden=hidden,
            heads=heads,
            plain_width=plain,
            rotated_width=rotated,
            value_width=value,
            latent_width=latent,
            query_rank=q_rank,
            q_norm=q_norm,
            kv_norm=kv_norm or NormShape(RMS, latent, 0.0, 0.0, None, False),
            query_bias=q_bias,
            latent_bias=a_bias,
            out_bias=out_bias,
            scale=self._scale(binder),
            rotation=self._rotation(binder),
            growth=Growth.bind(binder) if self.grows else None,
            gate=None if self.gate is None else self.gate.bind(binder, f"{name}.gate", heads, value),
            replaces=(self.module,),
        )

    def _linear(
        self, binder: Binder, leaf: str, target: str, rows: int | None = None, may_have_bias: bool = True
    ) -> tuple[int, bool, int]:
        """Bind one linear; return its columns, whether it has a bias, and its rows."""
        path = f"{self.module}.{leaf}"
        linear = binder.linear(path)
        binder.fill_linear(target, (path,), linear.bias)
        if rows is not None and linear.rows != rows:
            binder.differ(f"{path} has {linear.rows} rows; the config's widths make {rows}")
        if linear.bias and not may_have_bias:
            binder.differ(f"{path} has a bias")
        return linear.columns, linear.bias, linear.rows

    def _scale(self, binder: Binder) -> float:
        scale = binder.attribute(self.module, "scaling")
        if isinstance(scale, (int, float)):
            return float(scale)
        binder.differ(f"{self.module}.scaling is {scale!r}, not a number")
        return 1.0

    def _rotation(self, binder: Binder) -> str:
        if self.rotation is not None:
            return self.rotation
        return PAIRS if binder.value("rope_interleave") else HALVES


@dataclass(frozen=True)
class LatentAttentionShape(MixerShape):
    """Dimensions and settings of one latent attention. `name` is the name of its module in the block.

    `query_rank`: width of the compressed queries, 0 if they are not compressed. If ranks share the heads, the values
    are one rank's, as in AttentionShape.
    """

    name: str
    hidden: int
    heads: int
    plain_width: int
    rotated_width: int
    value_width: int
    latent_width: int
    query_rank: int
    q_norm: NormShape | None
    kv_norm: NormShape
    query_bias: bool
    latent_bias: bool
    out_bias: bool
    scale: float
    rotation: str
    growth: Growth | None = None
    gate: GateShape | None = None
    first_head: int = 0
    head_counts: tuple[int, ...] = ()
    replaces: tuple[str, ...] = ()
    causal: bool = True
    inverted_mask: bool = False

    lends: ClassVar[str] = ""
    borrows: ClassVar[None] = None

    @property
    def position(self) -> Position:
        """How the model passes cos and sin; those of PAIRS are for columns that have been moved."""
        if self.rotation == NONE:
            return NoPosition()
        return Rotary(interleaved=True, once=True, is_complex=True) if self.rotation == COMPLEX else Rotary()

    @property
    def all_heads(self) -> int:
        return sum(self.head_counts) or self.heads

    @property
    def key_width(self) -> int:
        """Width of a head's query and key."""
        return self.plain_width + self.rotated_width

    @property
    def cached_rows(self) -> tuple[tuple[int, int], ...]:
        return (1, self.latent_width), (1, self.rotated_width)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        queries, expanded, values = (
            Extent(HEADS, self.heads, width)
            for width in (self.key_width, self.plain_width + self.value_width, self.value_width)
        )
        q_a = Matrix("q_a", self.query_rank, self.hidden, self.query_bias)
        gates = Extent(HEADS, self.heads, self.gate.width if self.gate else 0)
        gate = Matrix("gate", gates.length, self.hidden, self.gate is not None and self.gate.bias, COLUMN, (gates,))
        return (
            *((q_a,) if self.query_rank else ()),
            Matrix("q", queries.length, self.query_rank or self.hidden, False, COLUMN, (queries,)),
            Matrix("kv_a", self.latent_width + self.rotated_width, self.hidden, self.latent_bias),
            Matrix(
                "kv_b", expanded.length, self.latent_width, False, COLUMN, (expanded,),
                unquantized="the few tokens of a step multiply with its columns, too, so it has values",
            ),
            *((gate,) if self.gate else ()),
            Matrix("out", self.hidden, values.length, self.out_bias, ROW, (values,)),
        )  # fmt: skip

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        norms = (("q_norm", self.q_norm), ("kv_norm", self.kv_norm))
        of_norms = (inside(name, each) for name, norm in norms if norm is not None for each in norm.parameters)
        return (*super().parameters, *of_norms)

    @property
    def ops(self) -> tuple[str, ...]:
        rotary = () if self.rotation == NONE else ("rotary",)
        return (*rotary, "attention", "latent_attention", *self.kv_norm.ops)

    def of_rank(self, share: Share) -> LatentAttentionShape:
        return replace(
            self,
            heads=share.count(HEADS),
            out_bias=self.out_bias and share.is_first,
            first_head=share.own[HEADS][0],
            head_counts=share.counts(HEADS),
        )
