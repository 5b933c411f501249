"""Linear attention: the gated delta rule and Mamba-2's state spaces. Their declarations, binding and shape.

    projected = in(x): queries, keys, values, a gate, and for each head what makes the decay (and beta)
    q, k, v   = silu(causal convolution)
    y         = a recurrence over a state for each head (ops/recurrence.py), plus a multiple of v
    result    = out(norm of y with the gate)

A state space has B for keys, C for queries, x for values, and the time step dt in place of beta.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from infuse.architectures.bind import Binder, FoundLinear
from infuse.architectures.part import COLUMN, HEADS, KV_HEADS, ROW, Extent, Matrix, Parameter, Share, named
from infuse.architectures.parts.multipliers import Factors, Multipliers
from infuse.architectures.parts.short_conv import CausalConv, ConvShape, RecurrentShape, check_silu
from infuse.ground.errors import SpecMismatch
from infuse.parallel.slices import Span

# Sections of the first matrix. STEP: of each head, what its decay is made of.
Q, K, V, GATE, BETA, STEP = "queries", "keys", "values", "gate", "beta", "step"
Sections = tuple[str, ...]


@dataclass(frozen=True)
class GatedDelta:
    """A gated delta rule (arXiv 2412.06464) of the module at the path `module`.

    `inputs`: its first linears, each with the sections of its rows in order; `by_key_head`: they repeat for each head
    of the keys. `doubles`: an attribute (or config key) of the module that, if true, doubles beta.
    """

    module: str
    inputs: tuple[tuple[str, Sections], ...]
    norm: str = "norm"
    out: str = "out_proj"
    by_key_head: bool = False
    doubles: str = ""

    def of_layer(self, layer: nn.Module, config: Any) -> GatedDelta:
        return self

    def bind(self, binder: Binder, name: str) -> LinearAttentionShape:
        leaves = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
        key_heads, heads, key_width, value_width = (binder.own_count(self.module, leaf) for leaf in leaves)
        return _bound(
            binder,
            name,
            self,
            _sizes(key_heads, heads, key_width, value_width),
            key_heads=key_heads,
            heads=heads,
            key_width=key_width,
            value_width=value_width,
            delta=True,
            beta_factor=2.0 if self.doubles and binder.attribute(self.module, self.doubles) else 1.0,
            norm=bind_norm(binder, name, named(self.module, self.norm), value_width, value_width, gate_first=False),
        )


@dataclass(frozen=True)
class StateSpace:
    """A state space dual to attention (Mamba-2, arXiv 2405.21060) of the module at the path `module`.

    `norm`: the name of its norm, of what the gate has multiplied unless its `norm_before_gate` is set; layers may have
    an Identity. `multipliers`: with those of the sections of `inputs`. `mask`: the layer's argument with its mask.
    `beside`: layers have attention besides.
    """

    module: str
    inputs: tuple[tuple[str, Sections], ...] = (("in_proj", (GATE, V, K, Q, STEP)),)
    norm: str = "norm"
    out: str = "out_proj"
    multipliers: Multipliers = Multipliers()
    mask: str = ""
    beside: bool = False
    by_key_head: ClassVar[bool] = False

    def of_layer(self, layer: nn.Module, config: Any) -> StateSpace:
        return self

    def bind(self, binder: Binder, name: str) -> LinearAttentionShape:
        leaves = ("n_groups", "num_heads", "ssm_state_size", "head_dim")
        groups, heads, state_width, width = (binder.own_count(self.module, leaf) for leaf in leaves)
        limits = binder.attribute(self.module, "time_step_limit")
        if not isinstance(limits, (tuple, list)) or len(limits) != 2:
            binder.differ(f"{self.module}.time_step_limit is {limits!r}, not two numbers")
            limits = (0.0, math.inf)
        columns, norm = heads * width, named(self.module, self.norm)
        gate_first = not getattr(binder.module(norm, optional=True), "norm_before_gate", False)
        return _bound(
            binder,
            name,
            self,
            _sizes(groups, heads, state_width, width),
            key_heads=groups,
            heads=heads,
            key_width=state_width,
            value_width=width,
            delta=False,
            limits=(float(limits[0]), float(limits[1])),
            norm=bind_norm(binder, name, norm, columns // groups, columns, gate_first=gate_first),
            skip=True,
            factors=self.multipliers.bind(binder, sum(len(sections) for _, sections in self.inputs)),
            mask_argument=self.mask,
            beside=self.beside,
        )


def _sizes(key_heads: int, heads: int, key_width: int, value_width: int) -> dict[str, int]:
    """Rows of each section."""
    keys, values = key_heads * key_width, heads * value_width
    return {Q: keys, K: keys, V: values, GATE: values, BETA: heads, STEP: heads}


def _bound(
    binder: Binder, name: str, of: GatedDelta | StateSpace, sizes: dict[str, int], **own: Any
) -> LinearAttentionShape:
    """Bind what both kinds have: first linears, convolution, parameters of heads, last linear."""
    sections, into = _bind_inputs(binder, name, of, sizes, own["key_heads"])
    out = bind_out(binder, name, named(of.module, of.out), sizes[V])
    check_silu(binder, of.module)
    conv = CausalConv(named(of.module, "conv1d"))
    shape = LinearAttentionShape(
        hidden=into.columns,
        sections=sections,
        conv=conv.bind(binder, name, sum(sizes[section] for section in (Q, K, V))),
        in_bias=into.bias,
        out_bias=out.bias,
        replaces=(of.module,),
        **own,
    )
    for leaf in shape.of_heads:
        binder.fill_parameter(named(name, leaf), named(of.module, leaf), (shape.heads,))
    return shape


def _bind_inputs(
    binder: Binder, name: str, of: GatedDelta | StateSpace, sizes: dict[str, int], key_heads: int
) -> tuple[Sections, FoundLinear]:
    """Bind the first linears, merged as "in"; return the order of its sections, and its size."""
    paths = tuple(named(of.module, path) for path, _ in of.inputs)
    linears, places = [binder.linear(path) for path in paths], {}
    for number, (path, linear, (_, sections)) in enumerate(zip(paths, linears, of.inputs, strict=True)):
        rows = sum(sizes[section] for section in sections)
        if linear.rows != rows or linear.columns != linears[0].columns:
            binder.differ(f"{path} is {linear.rows} x {linear.columns}, not {rows} x {linears[0].columns}")
        repeats, at = key_heads if of.by_key_head else 1, 0
        for section in sections:
            length = sizes[section] // repeats
            starts = range(at, at + repeats * (rows // repeats), max(rows // repeats, 1))
            places[section] = tuple(Span(number, start, start + length) for start in starts)
            at += length
    spans = tuple(span for section in places for span in places[section])
    bias = binder.all_or_no_bias(paths, linears)
    whole = len(paths) == 1 and not of.by_key_head
    binder.fill_linear(named(name, "in"), paths, bias, rows=() if whole else spans)
    return tuple(places), FoundLinear(sum(linear.rows for linear in linears), linears[0].columns, bias)


def bind_out(binder: Binder, name: str, path: str, columns: int) -> FoundLinear:
    out = binder.linear(path)
    if out.columns != columns:
        binder.differ(f"{path} takes {out.columns} columns, and the heads have {columns}")
    binder.fill_linear(named(name, "out"), (path,), out.bias)
    return out


def bind_norm(binder: Binder, name: str, path: str, width: int, columns: int, *, gate_first: bool) -> GatedNormShape:
    norm = binder.module(path)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if isinstance(norm, nn.Identity):
        return GatedNormShape(width, columns, 0.0, gate_first, False)
    if not isinstance(eps, float):
        binder.differ(f"{path} has no eps")
    binder.fill_parameter(named(name, "norm"), f"{path}.weight", (columns,))
    return GatedNormShape(width, columns, float(eps or 0.0), gate_first, True)


@dataclass(frozen=True)
class GatedNormShape:
    """A norm of each `width` columns with a gate; its weight, if `there`, has `columns`. Without one, the gate alone.

    `gate_first`: the gate multiplies what is normalised. `sigmoid`: of the gate, else SiLU. If ranks share the columns
    of a norm, `shared_by` is the number of norms on all ranks, and `place` the index of this rank's.
    """

    width: int
    columns: int
    eps: float
    gate_first: bool
    there: bool
    sigmoid: bool = False
    shared_by: int = 0
    place: int = 0


@dataclass(frozen=True)
class LinearAttentionShape(RecurrentShape):
    """Dimensions and settings of one linear attention. If ranks share it, the values are one rank's.

    `sections` are those of the first matrix, in order. `delta`: the delta rule, else a state space, whose `limits` are
    those of dt in prompts. `skip`: a multiple of the values is added to what is read.
    """

    hidden: int
    key_heads: int
    heads: int
    key_width: int
    value_width: int
    sections: Sections
    conv: ConvShape
    in_bias: bool
    out_bias: bool
    delta: bool
    norm: GatedNormShape
    beta_factor: float = 1.0
    limits: tuple[float, float] = (0.0, math.inf)
    skip: bool = False
    replaces: tuple[str, ...] = ()
    factors: Factors | None = None
    mask_argument: str = ""
    beside: bool = False

    @property
    def of_heads(self) -> tuple[str, ...]:
        """Parameters with a number for each head."""
        return ("A_log", "dt_bias", *(("D",) if self.skip else ()))

    @property
    def scale(self) -> float:
        """Of the queries."""
        return self.key_width**-0.5 if self.delta else 1.0

    @property
    def rows(self) -> dict[str, int]:
        """Rows of each section, in order."""
        sizes = _sizes(self.key_heads, self.heads, self.key_width, self.value_width)
        return {section: sizes[section] for section in self.sections}

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values, which are next to each other."""
        return sum(rows for section, rows in self.rows.items() if section in (Q, K, V))

    @property
    def state_values(self) -> int:
        return self.heads * self.key_width * self.value_width + self.channels * self.conv.taps

    def extents(self, *sections: str) -> tuple[Extent, ...]:
        keys, values = (Extent(KV_HEADS, self.key_heads, self.key_width), Extent(HEADS, self.heads, self.value_width))
        of_section = {Q: keys, K: keys, V: values, GATE: values}
        return tuple(of_section.get(section, Extent(HEADS, self.heads)) for section in sections)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        columns = self.heads * self.value_width
        return (
            Matrix("in", sum(self.rows.values()), self.hidden, self.in_bias, COLUMN, self.extents(*self.sections)),
            Matrix("out", self.hidden, columns, self.out_bias, ROW, self.extents(V)),
        )

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        convolved = [section for section in self.sections if section in (Q, K, V)]
        norm = Parameter("norm", self.extents(V) if self.norm.columns > self.value_width else ())
        return (
            *super().parameters,
            *self.conv.parameters(self.extents(*convolved)),
            *(Parameter(leaf, self.extents(STEP)) for leaf in self.of_heads),
            *((norm,) if self.norm.there else ()),
        )

    @property
    def ops(self) -> tuple[str, ...]:
        return ("causal_conv", "decay", "linear_attention", "gated_norm")

    def of_rank(self, share: Share) -> LinearAttentionShape:
        heads, key_heads, norm = share.count(HEADS), share.count(KV_HEADS), self.norm
        if norm.there and norm.columns > self.value_width:
            columns = heads * self.value_width
            if norm.width * self.key_heads != norm.columns:
                raise SpecMismatch("its norm", [f"a norm over {norm.width} columns, which are not one group's heads"])
            norm = replace(norm, columns=columns)
            if self.key_heads < len(share.ranges[KV_HEADS]):  # then each rank has heads of one group
                norm = replace(norm, shared_by=self.key_heads, place=share.own[KV_HEADS][0])
        return replace(self, heads=heads, key_heads=key_heads, norm=norm, out_bias=self.out_bias and share.is_first)
