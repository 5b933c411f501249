"""Self-attention: its declaration in a spec, its binding to a layer, and its shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from infuse.architectures.bind import Binder
from infuse.architectures.packing import BLOCKS, Fill, Heads
from infuse.architectures.part import COLUMN, HEADS, KV_HEADS, ROW, Extent, Matrix, MixerShape, Parameter, Share, named
from infuse.architectures.parts.disentangled import Disentangled, DisentangledShape
from infuse.architectures.parts.multipliers import Factors, Multipliers
from infuse.architectures.parts.norm import LAYER, Norm, NormShape
from infuse.ground.errors import SpecMismatch
from infuse.parallel.slices import Span

GATE_SIGMOID, GATE_SOFTPLUS = "sigmoid", "softplus"  # functions of an output gate
NO_ATTRIBUTE = ""
SHARED_STATES = "shared_kv_states"  # the argument in which layers lend their keys and values to later ones


@dataclass(frozen=True)
class Separate:
    """Query, key and value in separate linears."""

    q: str
    k: str
    v: str

    def bind(self, binder: Binder, target: str, heads: int, kv_heads: int) -> tuple[int, int, bool]:
        """Bind them, merged as `target`; return hidden width, head width, and whether they have a bias."""
        paths = (self.q, self.k, self.v)
        q, k = (binder.linear(path) for path in paths[:2])
        v = k if self.v == self.k else binder.linear(self.v)
        linears = [q, k, v]
        width = q.rows // heads
        expected = (heads * width, kv_heads * width, kv_heads * width)
        if (q.rows, k.rows, v.rows) != expected:
            binder.differ(
                f"q, k, v have {q.rows}, {k.rows}, {v.rows} rows; {heads} and {kv_heads} heads want {expected}"
            )
        return q.columns, width, binder.fill_heads(target, paths, linears, Heads(heads, kv_heads, width))


@dataclass(frozen=True)
class GatedSeparate(Separate):
    """The same, where the linear of queries has [query | gate] of each head: its sigmoid multiplies the heads."""

    def bind(self, binder: Binder, target: str, heads: int, kv_heads: int) -> tuple[int, int, bool]:
        """Bind them, merged as `target`: [q | k | v | gate]."""
        paths = (self.q, self.k, self.v)
        linears = [binder.linear(path) for path in paths]
        width, keys = linears[0].rows // (2 * heads), linears[1].rows
        if [linear.rows for linear in linears] != [2 * heads * width, kv_heads * width, kv_heads * width]:
            binder.differ(f"{', '.join(paths)} are not [query | gate] of {heads} heads, and {kv_heads} keys and values")
        starts = range(0, 2 * heads * width, max(2 * width, 1))
        rows = (
            *(Span(0, start, start + width) for start in starts),
            Span(1, 0, keys),
            Span(2, 0, keys),
            *(Span(0, start + width, start + 2 * width) for start in starts),
        )
        bias = binder.all_or_no_bias(paths, linears)
        binder.fill_linear(target, paths, bias, rows=rows)
        return linears[0].columns, width, bias


@dataclass(frozen=True)
class Queries:
    """Queries alone: keys and values are another layer's."""

    q: str


@dataclass(frozen=True)
class Lender:
    """Whose keys and values a layer attends to: the name under which they are passed, and the layer's index."""

    name: str
    index: int


@dataclass(frozen=True)
class Packed:
    """Query, key and value in one linear, with rows in the order of `packing`."""

    path: str
    packing: str = BLOCKS


@dataclass(frozen=True)
class NoPosition:
    """No positions in attention: the embeddings have them, or the model has none."""


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding; the model passes `position_embeddings=(cos, sin)`.

    `switch`: config key of a list that says for each layer whether it rotates. `where`: attributes of the attention
    module, one of which is set in layers that rotate. `in_halves`: cos and sin have the order of pairs (i, i + E/2)
    although the pairs are interleaved. `once`: cos and sin have one column per pair. `sin_first`: (sin, cos) is passed.
    `flat`: cos and sin are [tokens, width], for all texts alike. `prefix`: they have no rows for the first tokens,
    which are not turned. `is_complex`: one tensor [batch or 1, tokens, width / 2] of cos + i sin is passed. `optional`:
    None is passed by models that do not rotate.
    """

    interleaved: bool = False
    switch: str | None = None
    in_halves: bool = False
    where: tuple[str, ...] = ()
    once: bool = False
    sin_first: bool = False
    flat: bool = False
    prefix: bool = False
    is_complex: bool = False
    optional: bool = False


@dataclass(frozen=True)
class RotaryTable:
    """Rotary embedding from a buffer of the layer, [positions, sin | cos], indexed by the call's `position_ids`."""

    buffer: str


@dataclass(frozen=True)
class Alibi:
    """ALiBi bias passed as the keyword `argument`: [B H, 1, L], or [H, 1, S], where the last L columns count."""

    argument: str


@dataclass(frozen=True)
class RelativeBias:
    """T5's bias from a table [buckets, heads], by the distance between query and key: in both directions, or, where
    attention is `causal`, to earlier keys alone.

    `argument`: a layer without a `table` gets another layer's bias in this argument, and returns it, too. None: every
    layer has its own table. `buckets` and `farthest` (the distance from which the last bucket counts) are config keys
    or numbers.
    """

    table: str
    argument: str | None = None
    buckets: str | int = "relative_attention_num_buckets"
    farthest: str | int = "relative_attention_max_distance"
    causal: bool = False


@dataclass(frozen=True)
class PassedScores:
    """A bias of the scores passed as the keyword `argument`: [B or 1, H, T, L]. None adds nothing."""

    argument: str


Position = NoPosition | Rotary | RotaryTable | Alibi | RelativeBias | PassedScores | Disentangled | DisentangledShape


@dataclass(frozen=True)
class Window:
    """A causal sliding window that a layer adds to every mask that it receives.

    Layers whose entry in the config list `types` is `value` see `size` tokens, the others `positions` (config keys).
    """

    types: str
    value: str
    size: str
    positions: str


@dataclass(frozen=True)
class OutputGate:
    """A linear at `path` over the attention's input; `function` of its output multiplies the heads before `out`.

    It has one output per head, or one per feature of the heads. `function`: GATE_SIGMOID in the dtype of the
    activations, GATE_SOFTPLUS in float32. `optional`: layers may have None in its place.
    """

    path: str
    function: str = GATE_SIGMOID
    optional: bool = False

    def bind(self, binder: Binder, target: str, heads: int, width: int) -> GateShape:
        linear = binder.linear(self.path)
        binder.fill_linear(target, (self.path,), linear.bias)
        if linear.rows not in (heads, heads * width):
            binder.differ(
                f"{self.path} has {linear.rows} outputs; {heads} heads of {width} want {heads} or {heads * width}"
            )
        return GateShape(self.function, linear.rows // heads, linear.bias)


@dataclass(frozen=True)
class GateShape:
    """An output gate bound to a layer: `width` outputs for each head; `merged`: the last rows of qkv make them."""

    function: str
    width: int
    bias: bool
    merged: bool = False


@dataclass(frozen=True)
class Growth:
    """Queries at position p are multiplied by 1 + beta log(1 + floor((p + offset) / every)) (Llama 4).

    `counted`: a token's position is its index in the cache, padding included, whatever positions the model passes.
    """

    beta: float
    every: float
    offset: float = 0.0
    counted: bool = False

    @classmethod
    def bind(cls, binder: Binder) -> Growth:
        rope: Any = binder.value("rope_parameters")
        found = [rope.get(key) for key in ("llama_4_scaling_beta", "original_max_position_embeddings")]
        if not all(isinstance(number, (int, float)) for number in found):
            binder.differ(f"config.rope_parameters has {found} for the growth of queries, not two numbers")
            return cls(0.0, 1.0)
        beta, every = map(float, found)
        return cls(beta, every)


@dataclass(frozen=True)
class Sinks:
    """The parameter at `path`: a logit per head that joins the softmax and attends to nothing. Layers may lack it.

    `in_weights`: the attention weights that the original returns are normalized with it, so they sum to less than 1.
    """

    path: str
    in_weights: bool = True


@dataclass(frozen=True)
class Attention:
    """Self-attention. `module` is the attention module's path; transformers records attentions by its class.
    `inner`: the module inside it that has the settings, if it has none itself.

    `heads`: a config key of a number, or of a list with one for each layer. `kv_heads`: a config key, a number, or None
    for one per query head. `scale`: an attribute of `module`, a number, or None for 1/sqrt(head width). `softcap` and
    `clip`: attributes of `module`. Separate values may be the keys, before norm and rotation. `lends`: the name under
    which keys and values are passed to later layers, `borrows`: the layer that lends them. `inverted_mask`: True in the
    mask means hidden. `norm_after`: q_norm and k_norm follow the rotation. `grows`: queries grow with positions
    (Growth). `out_norm`: of the attended heads together, before `out`. `passes`: keywords that the module passes to its
    attention function, each with the attribute (or config key) to pass and, optionally, an attribute that is set only
    in layers that pass it; others pass None. `by_name`: False if the module computes its scores itself. `multipliers`:
    with those of queries, keys and values.
    """

    module: str
    qkv: Separate | Packed | Queries
    out: str
    position: Position = NoPosition()
    kv_heads: str | int | None = None
    heads: str = "num_attention_heads"
    scale: str | float | None = "scaling"
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    v_norm: Norm | None = None
    out_norm: Norm | None = None
    softcap: str | None = None
    clip: str | None = None
    window: Window | None = None
    causal: bool = True
    inverted_mask: bool = False
    passes: tuple[tuple[str, ...], ...] = ()
    norm_after: bool = False
    gate: OutputGate | None = None
    inner: str = ""
    sinks: Sinks | None = None
    grows: bool = False
    by_name: bool = True
    lends: str = ""
    borrows: Lender | None = None
    multipliers: Multipliers = Multipliers()

    def of_layer(self, layer: Any, config: Any) -> Attention:
        return self

    def bind(self, binder: Binder, name: str) -> AttentionShape:
        heads = binder.count(self.heads)
        if self.kv_heads is None:
            kv_heads = heads
        else:
            kv_heads = self.kv_heads if isinstance(self.kv_heads, int) else binder.count(self.kv_heads)
        hidden, width, bias = self._bind_qkv(binder, f"{name}.qkv", heads, kv_heads)
        out = binder.linear(self.out)
        binder.fill_linear(f"{name}.out", (self.out,), out.bias)
        if out.columns != heads * width:
            binder.differ(f"{self.out} takes {out.columns} columns; {heads} heads of {width} make {heads * width}")
        position = self._position(binder, name)
        q_norm, k_norm = (
            None if norm is None else self._head_norm(binder, f"{name}.{target}", width, norm)
            for target, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm))
        )
        return AttentionShape(
            name=name,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_width=width,
            qkv_bias=bias,
            out_bias=out.bias,
            position=position,
            scale=self._scale(binder, width, position),
            softcap=self._softcap(binder),
            clip=self._number(binder, self.clip),
            window=self._window(binder),
            causal=bool(getattr(binder.module(self.module), "is_causal", self.causal)),
            inverted_mask=self.inverted_mask,
            q_norm=q_norm,
            k_norm=k_norm,
            passes=self._passed(binder),
            norm_after=self.norm_after and not q_norm is k_norm is None,
            gate=self._gate(binder, name, heads, width, bias),
            replaces=(*((f"{self.module}.{self.inner}",) if self.inner else ()), self.module),
            sinks=self._sinks(binder, name, heads),
            sinks_in_weights=self.sinks is not None and self.sinks.in_weights,
            growth=self._growth(binder),
            by_name=self.by_name,
            v_norm=self._v_norm(binder, name, width),
            out_norm=None if self.out_norm is None else self.out_norm.bind(binder, f"{name}.out_norm"),
            lends=self.lends,
            borrows=self.borrows,
            factors=self.multipliers.bind(binder, 3),
        )

    def _gate(self, binder: Binder, name: str, heads: int, width: int, bias: bool) -> GateShape | None:
        if isinstance(self.qkv, GatedSeparate):
            return GateShape(GATE_SIGMOID, width, bias, merged=True)
        if self.gate is None or (self.gate.optional and binder.module(self.gate.path, optional=True) is None):
            return None
        return self.gate.bind(binder, f"{name}.gate", heads, width)

    def _growth(self, binder: Binder) -> Growth | None:
        return Growth.bind(binder) if self.grows else None

    def _head_norm(self, binder: Binder, name: str, width: int, declared: Norm) -> NormShape | None:
        """A norm of queries or keys. One without a weight may not tell its width: that of a head."""
        norm = declared.bind(binder, name, optional=True)
        return replace(norm, width=width) if norm is not None and not norm.width else norm

    def _v_norm(self, binder: Binder, name: str, width: int) -> NormShape | None:
        """A norm over each head of the values, which has no weight."""
        norm = None if self.v_norm is None else self.v_norm.bind(binder, f"{name}.v_norm")
        if norm is not None and norm.weight is not None:
            binder.differ(f"the norm of values has a weight {norm.weight}")
        return None if norm is None else replace(norm, width=width)

    def _passed(self, binder: Binder) -> tuple[tuple[str, str], ...]:
        """Keywords and the attributes that this layer passes; no attribute stands for None."""
        return tuple(
            (keyword, name if self._is_set(binder, where) else NO_ATTRIBUTE) for keyword, name, *where in self.passes
        )

    def _is_set(self, binder: Binder, names: Sequence[str]) -> bool:
        """Whether one of these attributes of the module is set; True if there are none."""
        return not names or any(tuple(binder.attribute(self.module, name) for name in names))

    def _sinks(self, binder: Binder, name: str, heads: int) -> bool:
        if self.sinks is None or self.sinks.path not in binder.parameters:
            return False
        binder.fill_parameter(f"{name}.sinks", self.sinks.path, (heads,))
        return True

    def _bind_qkv(self, binder: Binder, target: str, heads: int, kv_heads: int) -> tuple[int, int, bool]:
        """Bind the projections; return hidden width, head width, and whether they have a bias."""
        if isinstance(self.qkv, Queries):
            q = binder.linear(self.qkv.q)
            if q.rows % heads:
                binder.differ(f"{self.qkv.q} has {q.rows} rows; {heads} heads do not divide them")
            binder.fill_linear(target, (self.qkv.q,), q.bias)
            return q.columns, q.rows // heads, q.bias
        if isinstance(self.qkv, Separate):
            return self.qkv.bind(binder, target, heads, kv_heads)
        packed = binder.linear(self.qkv.path)
        width = packed.rows // (heads + 2 * kv_heads)
        if packed.rows != (heads + 2 * kv_heads) * width:
            binder.differ(f"{self.qkv.path} has {packed.rows} rows; {heads} + 2 x {kv_heads} heads do not divide them")
        packing = None if self.qkv.packing == BLOCKS else self.qkv.packing  # already [q | k | v]: no reordering
        binder.fill_linear(target, (self.qkv.path,), packed.bias, packing, Heads(heads, kv_heads, width))
        return packed.columns, width, packed.bias

    def _scale(self, binder: Binder, width: int, position: Position) -> float:
        if isinstance(position, DisentangledShape):
            return 1 / math.sqrt(max(width, 1) * position.terms)
        if isinstance(self.scale, str):
            scale = getattr(binder.module(self.module, optional=True), self.scale, None)
            if isinstance(scale, (int, float)):
                return float(scale)
            binder.differ(f"{self.module}.{self.scale} is {scale!r}, not a number")
            return 1.0
        return 1 / math.sqrt(max(width, 1)) if self.scale is None else self.scale

    def _number(self, binder: Binder, name: str | None) -> float:
        return float(binder.attribute(self.module, name) or 0.0) if name else 0.0

    def _softcap(self, binder: Binder) -> float:
        # transformers' sdpa attention ignores soft caps; newer releases refuse sdpa for models that have one.
        ignored = getattr(binder.config, "_attn_implementation", None) == "sdpa"
        return 0.0 if ignored else self._number(binder, self.softcap)

    def _position(self, binder: Binder, name: str) -> Position:
        position = self.position
        if isinstance(position, Rotary) and position.switch:
            rotates = binder.of_this_layer(position.switch)
            return replace(position, switch=None) if rotates else NoPosition()
        if isinstance(position, Rotary) and position.where:
            return replace(position, where=()) if self._is_set(binder, position.where) else NoPosition()
        if isinstance(position, RotaryTable):
            if not any(path == position.buffer for path, _ in binder.layer.named_buffers()):
                binder.differ(f"there is no buffer {position.buffer}")
            binder.fills.append(Fill(f"{name}.positions.table", (position.buffer,)))
        if isinstance(position, Disentangled):
            return position.bind(binder, name, self.module)
        return self._relative(binder, name, position) if isinstance(position, RelativeBias) else position

    def _relative(self, binder: Binder, name: str, position: RelativeBias) -> RelativeBias:
        counts = [n if isinstance(n, int) else binder.count(n) for n in (position.buckets, position.farthest)]
        bound = RelativeBias("", position.argument, counts[0], counts[1], self.causal)
        if position.table not in binder.parameters:
            if position.argument is None:
                binder.differ(f"there is no parameter {position.table}")
            return bound
        expected, shape = (counts[0], binder.count(self.heads)), tuple(binder.claim(position.table).shape)
        if shape != expected:
            binder.differ(f"{position.table} has shape {shape}; buckets and heads make {expected}")
        binder.fills.append(Fill(f"{name}.positions.table", (position.table,)))
        return replace(bound, table=position.table)

    def _window(self, binder: Binder) -> int:
        if self.window is None:
            return 0
        local = binder.of_this_layer(self.window.types) == self.window.value
        return binder.count(self.window.size if local else self.window.positions)


@dataclass(frozen=True)
class AttentionShape(MixerShape):
    """Dimensions and settings of one attention. `name` is the name of its module in the block.

    If ranks share it, the values are one rank's: `first_head` and `first_kv_head` are its first heads, `head_counts`
    are the query heads of every rank. `by_name`: False if the original computes its scores itself, whatever function
    its config names.
    """

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_width: int
    qkv_bias: bool
    out_bias: bool
    position: Position
    scale: float
    softcap: float
    clip: float
    window: int
    causal: bool
    inverted_mask: bool
    q_norm: NormShape | None
    k_norm: NormShape | None
    first_head: int = 0
    head_counts: tuple[int, ...] = ()
    passes: tuple[tuple[str, str], ...] = ()
    norm_after: bool = False
    gate: GateShape | None = None
    replaces: tuple[str, ...] = ()
    sinks: bool = False
    sinks_in_weights: bool = False
    growth: Growth | None = None
    by_name: bool = True
    v_norm: NormShape | None = None
    out_norm: NormShape | None = None
    lends: str = ""
    borrows: Lender | None = None
    first_kv_head: int = 0
    factors: Factors | None = None

    @property
    def merges_gate(self) -> bool:
        return self.gate is not None and self.gate.merged

    @property
    def taken_extents(self) -> tuple[Extent, ...]:
        return () if self.borrows is None else (Extent(KV_HEADS, self.kv_heads, self.head_width),)

    @property
    def all_heads(self) -> int:
        return sum(self.head_counts) or self.heads

    @property
    def bias_argument(self) -> str | None:
        return self.position.argument if isinstance(self.position, (Alibi, RelativeBias, PassedScores)) else None

    @property
    def mask_of_numbers(self) -> bool:
        return isinstance(self.position, DisentangledShape)

    @property
    def cached_rows(self) -> tuple[tuple[int, int], ...]:
        return ((self.kv_heads, self.head_width),) * 2

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        width = self.head_width
        queries, keys = Extent(HEADS, self.heads, width), Extent(KV_HEADS, self.kv_heads, width)
        merged = (queries, *((keys, keys) if self.borrows is None else ()), *((queries,) if self.merges_gate else ()))
        rows = sum(extent.length for extent in merged)
        qkv = Matrix("qkv", rows, self.hidden, self.qkv_bias, COLUMN, merged)
        out = Matrix("out", self.hidden, queries.length, self.out_bias, ROW, (queries,))
        more = []
        if self.gate is not None and not self.merges_gate:
            gates = Extent(HEADS, self.heads, self.gate.width)
            more = [Matrix("gate", gates.length, self.hidden, self.gate.bias, COLUMN, (gates,))]
        if isinstance(self.position, DisentangledShape):
            biases = (("pos_key", self.position.key_bias), ("pos_query", self.position.query_bias))
            more += [
                Matrix(target, queries.length, self.hidden, bias, COLUMN, (queries,))
                for target, bias in biases
                if bias is not None
            ]
        return qkv, out, *more

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        parameters = list(super().parameters)
        if isinstance(self.position, RelativeBias) and self.position.table:
            parameters.append(Parameter("positions.table"))
        for name, norm, unit, count in self._norms():
            extents = self._extents(norm, unit, count)
            parameters += [Parameter(named(name, parameter.target), extents) for parameter in norm.parameters]
        if self.sinks:
            parameters.append(Parameter("sinks", (Extent(HEADS, self.heads),)))
        return tuple(parameters)

    @property
    def ops(self) -> tuple[str, ...]:
        norms = [op for _, norm, _, _ in self._norms() for op in norm.ops]
        return tuple(dict.fromkeys(("rotary", "rotary_append", "attention", *norms)))

    def of_rank(self, share: Share) -> AttentionShape:
        if wide := [name for name, norm, _, _ in self._norms() if norm.kind == LAYER and self._is_wide(norm)]:
            differences = [f"{name} is a LayerNorm over the heads of all ranks" for name in wide]
            raise SpecMismatch(self.name, differences)
        keys, all_keys = share.own[KV_HEADS], share.ranges[KV_HEADS]
        sharers = all_keys.count(keys) if self.kv_heads < len(all_keys) else 1
        return replace(
            self,
            heads=share.count(HEADS),
            kv_heads=share.count(KV_HEADS),
            out_bias=self.out_bias and share.is_first,
            q_norm=self._norm_of_rank(self.q_norm, share.count(HEADS), 1),
            k_norm=self._norm_of_rank(self.k_norm, share.count(KV_HEADS), sharers),
            out_norm=self._norm_of_rank(self.out_norm, share.count(HEADS), 1),
            first_head=share.own[HEADS][0],
            first_kv_head=share.own[KV_HEADS][0],
            head_counts=share.counts(HEADS),
        )

    def _norms(self) -> list[tuple[str, NormShape, str, int]]:
        """Name, norm, unit and head count of each query or key norm."""
        norms = (
            ("q_norm", self.q_norm, HEADS, self.heads),
            ("k_norm", self.k_norm, KV_HEADS, self.kv_heads),
            ("v_norm", self.v_norm, KV_HEADS, self.kv_heads),
            ("out_norm", self.out_norm, HEADS, self.heads),
        )
        return [(name, norm, unit, count) for name, norm, unit, count in norms if norm is not None]

    def _extents(self, norm: NormShape, unit: str, count: int) -> tuple[Extent, ...]:
        """Extents of a norm's weight: per-head weights, or one over all heads. () if the heads share one weight."""
        if norm.weight is not None and len(norm.weight) == 2:
            return (Extent(unit, count),)
        return (Extent(unit, count, self.head_width),) if self._is_wide(norm) else ()

    def _is_wide(self, norm: NormShape) -> bool:
        """Whether the norm normalizes all heads together."""
        return norm.weight is not None and len(norm.weight) == 1 and norm.width != self.head_width

    def _norm_of_rank(self, norm: NormShape | None, heads: int, copies: int) -> NormShape | None:
        if norm is None or norm.weight is None:
            return norm
        if len(norm.weight) == 2:
            return replace(norm, weight=(heads, norm.weight[1]))
        if not self._is_wide(norm):
            return norm
        width = heads * self.head_width
        return replace(norm, width=width, weight=(width,), whole=norm.width, copies=copies)
