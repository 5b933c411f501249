"""One rank's part of what a plan builds: shapes with its heads and widths, fills cut to them. Pure: numbers only.

A layer is split by heads and by the inner width: q, k, v, gate and up by outputs, attention's out and the MLP's down by
inputs, whose bias is added on rank 0 alone. Norms and tables that all ranks need stay whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from infuse.architectures.layer import LAYER, AttentionShape, LayerShape, NormShape
from infuse.architectures.packing import STACK, Fill
from infuse.architectures.plain import EmbeddingShape, LinearShape
from infuse.architectures.split import SplitShape
from infuse.errors import SpecMismatch
from infuse.parallel.mesh import Mesh
from infuse.parallel.slices import Cut, HeadShare, Range, split, split_heads

Shape = LayerShape | LinearShape | EmbeddingShape | SplitShape


@dataclass(frozen=True)
class Part:
    """The shape and the fills of one rank."""

    shape: Shape
    fills: tuple[Fill, ...]


def layer_part(shape: LayerShape, fills: tuple[Fill, ...], mesh: Mesh, *, grain: int, multiple: int) -> Part:
    """`mesh.tp_rank`'s part of a layer. SpecMismatch: what cannot be shared by so many ranks.

    The inner width is split in steps of `grain`, whole groups of `multiple` (of the format of `down`).
    """
    attn, mlp = shape.attn, shape.mlp
    heads = split_heads(attn.heads, attn.kv_heads, mesh.tp)
    differences = []
    if heads is None:
        differences.append(f"{attn.heads} heads are too few for {mesh.tp} ranks")
    if mlp.inner < mesh.tp:
        differences.append(f"{mlp.inner} inner features are too few for {mesh.tp} ranks")
    for name, norm in (("q_norm", attn.q_norm), ("k_norm", attn.k_norm)):
        if norm is not None and norm.kind == LAYER and _is_wide(norm, attn):
            differences.append(f"{name} is a LayerNorm over the heads of all ranks")
    if differences or heads is None:
        raise SpecMismatch(f"tensor parallelism over {mesh.tp} ranks", differences)
    inner = split(mlp.inner, mesh.tp, grain=grain, multiple=multiple)
    cutter = _Cutter(shape, heads, inner, mesh.tp_rank)
    return Part(cutter.shape(), tuple(cut for fill in fills if (cut := cutter.fill(fill)) is not None))


@dataclass(frozen=True)
class _Cutter:
    whole: LayerShape
    heads: tuple[HeadShare, ...]
    inner: tuple[Range, ...]
    rank: int

    def shape(self) -> LayerShape:
        attn, mlp, mine = self.whole.attn, self.whole.mlp, self.heads[self.rank]
        first = self.rank == 0
        sharers = sum(share.kv_heads == mine.kv_heads for share in self.heads) if attn.kv_heads < len(self.heads) else 1
        own_attn = replace(
            attn,
            heads=_length(mine.heads),
            kv_heads=_length(mine.kv_heads),
            out_bias=attn.out_bias and first,
            q_norm=_norm_part(attn.q_norm, attn, mine.heads, 1),
            k_norm=_norm_part(attn.k_norm, attn, mine.kv_heads, sharers),
            first_head=mine.heads[0],
            head_counts=tuple(_length(share.heads) for share in self.heads),
        )
        own_mlp = replace(mlp, inner=_length(self.inner[self.rank]), out_bias=mlp.out_bias and first)
        return replace(self.whole, attn=own_attn, mlp=own_mlp)

    def fill(self, fill: Fill) -> Fill | None:
        """This rank's part of `fill`, None where it has none."""
        attn, mlp, mine = self.whole.attn, self.whole.mlp, self.heads[self.rank]
        width, inner = attn.head_width, self.inner[self.rank]
        owner, _, leaf = fill.target.rpartition(".")
        if owner == f"{attn.name}.qkv":
            sizes = (attn.heads * width, attn.kv_heads * width, attn.kv_heads * width)
            keys = attn.heads + mine.kv_heads[0], attn.heads + mine.kv_heads[1]
            values = keys[0] + attn.kv_heads, keys[1] + attn.kv_heads
            ranges = tuple((start * width, stop * width) for start, stop in (mine.heads, keys, values))
            return replace(fill, cut=Cut(0, ranges, sizes if len(fill.sources) == 3 else (sum(sizes),)))
        if owner == "mlp.up":
            both = (inner, (inner[0] + mlp.inner, inner[1] + mlp.inner)) if mlp.gated else (inner,)
            each = (mlp.inner,) * len(both)
            return replace(fill, cut=Cut(0, both, each if len(fill.sources) == len(both) else (sum(each),)))
        if owner in (f"{attn.name}.out", "mlp.down"):
            if leaf == "bias":
                return fill if self.rank == 0 else None
            columns = inner if owner == "mlp.down" else (mine.heads[0] * width, mine.heads[1] * width)
            return replace(fill, cut=Cut(1, (columns,), (mlp.inner if owner == "mlp.down" else attn.heads * width,)))
        if owner in (f"{attn.name}.q_norm", f"{attn.name}.k_norm"):
            norm, own = (attn.q_norm, mine.heads) if owner.endswith("q_norm") else (attn.k_norm, mine.kv_heads)
            assert norm is not None
            if (
                norm.weight is not None and len(norm.weight) == 2
            ):  # a weight for each head, in one matrix or in one norm for each
                return replace(
                    fill, cut=Cut(0, (own,), (1,) * len(fill.sources) if fill.merge == STACK else norm.weight[:1])
                )
            if _is_wide(norm, attn):
                return replace(fill, cut=Cut(0, ((own[0] * width, own[1] * width),), (norm.width,)))
        return fill


def _norm_part(norm: NormShape | None, attn: AttentionShape, own: Range, copies: int) -> NormShape | None:
    if norm is None or norm.weight is None:
        return norm
    if len(norm.weight) == 2:
        return replace(norm, weight=(_length(own), norm.weight[1]))
    if not _is_wide(norm, attn):
        return norm
    width = _length(own) * attn.head_width
    return replace(norm, width=width, weight=(width,), whole=norm.width, copies=copies)


def _is_wide(norm: NormShape, attn: AttentionShape) -> bool:
    """Whether the norm goes over all heads at once."""
    return norm.weight is not None and len(norm.weight) == 1 and norm.width != attn.head_width


def _length(one: Range) -> int:
    return one[1] - one[0]


def output_part(shape: LinearShape, mesh: Mesh, grain: int) -> Part:
    """A rank's part of the outputs of a linear, whose results are put side by side."""
    parts = split(shape.outputs, mesh.tp, grain=grain)
    cut = Cut(0, (parts[mesh.tp_rank],), (shape.outputs,))
    own = replace(shape, outputs=_length(parts[mesh.tp_rank]), widths=tuple(_length(part) for part in parts))
    return Part(own, tuple(replace(fill, cut=cut) for fill in shape.fills))


def table_part(shape: EmbeddingShape, mesh: Mesh, grain: int) -> Part:
    """A rank's rows of an embedding table, the same as those of the head that may share it."""
    first, last = split(shape.rows, mesh.tp, grain=grain)[mesh.tp_rank]
    cut = Cut(0, ((first, last),), (shape.rows,))
    own = replace(shape, rows=last - first, first_row=first, all_rows=shape.rows)
    return Part(own, tuple(replace(fill, cut=cut) for fill in shape.fills))
