"""Kimi Delta Attention: a gated delta rule with a decay for each channel. Its declaration, binding and shape.

    q, k, v, b  = in(x)
    decay, gate = products of low(x), or further rows of in(x)
    y           = the delta rule (ops/recurrence.py) over silu(causal convolution of q, k, v), beta = sigmoid(b)
    result      = out(norm of y, times sigmoid(gate))

The linears of `low` have few rows, so they are whole on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from infuse.architectures.bind import Binder
from infuse.architectures.part import COLUMN, HEADS, ROW, Extent, Matrix, Parameter, Share, named
from infuse.architectures.parts.short_conv import CausalConv, ConvShape, RecurrentShape, check_silu
from infuse.architectures.parts.state_attention import GatedNormShape, bind_norm, bind_out


@dataclass(frozen=True)
class ChannelDelta:
    """Kimi Delta Attention (arXiv 2510.26692) of the module at the path `module`.

    `decay` and `gate`: the linears by which each is made of the hidden states: one, or two with a low rank between.
    A channel's logarithm of the decay is -exp(A_log) softplus(y), with y the sum of `dt_bias` and what is made, or,
    with a bound, that bound times sigmoid(exp(A_log) y). `bound`: an attribute of the module that has the bound;
    `bounded`: one that tells whether it holds. `rounded`: the logarithm is rounded to the dtype of the activations.
    """

    module: str = "self_attn"
    decay: tuple[str, ...] = ("forget_gate.f_a_proj", "forget_gate.f_b_proj")
    gate: tuple[str, ...] = ("g_a_proj", "g_b_proj")
    bound: str = ""
    bounded: str = ""
    rounded: bool = False

    def of_layer(self, layer: nn.Module, config: Any) -> ChannelDelta:
        return self

    def bind(self, binder: Binder, name: str) -> ChannelDeltaShape:
        heads, width = (binder.own_count(self.module, leaf) for leaf in ("num_heads", "head_dim"))
        rows = heads * width
        low = [paths[0] for paths in (self.decay, self.gate) if len(paths) == 2]
        first = {"q_proj": rows, "k_proj": rows, "v_proj": rows, "b_proj": heads}
        first |= {paths[0]: rows for paths in (self.decay, self.gate) if len(paths) == 1}
        hidden = self._merged(binder, f"{name}.in", first)
        ranks = {path: self._linear(binder, path)[0] for path in low}
        if low:
            binder.fill_linear(named(name, "low"), tuple(named(self.module, path) for path in low), False)
        for target, paths in (("decay", self.decay), ("gate", self.gate)):
            if len(paths) == 2:
                self._merged(binder, named(name, target), {paths[1]: rows}, ranks[paths[0]])
        out = bind_out(binder, name, named(self.module, "o_proj"), rows)
        conv = CausalConv(named(self.module, "conv1d")).bind(binder, name, 3 * rows)
        check_silu(binder, self.module)
        gate_module = self.decay[0].rpartition(".")[0]
        binder.fill_vector(named(name, "A_log"), named(self.module, f"{gate_module}.A_log"), heads)
        binder.fill_vector(named(name, "dt_bias"), named(self.module, f"{gate_module}.dt_bias"), rows)
        norm = bind_norm(binder, name, named(self.module, "o_norm"), width, width, gate_first=False)
        return ChannelDeltaShape(
            hidden=hidden,
            heads=heads,
            width=width,
            conv=conv,
            norm=replace(norm, sigmoid=True),
            decay_rank=ranks.get(self.decay[0], 0),
            gate_rank=ranks.get(self.gate[0], 0),
            out_bias=out.bias,
            bound=self._bound(binder),
            rounded=self.rounded,
            replaces=(self.module,),
        )

    def _linear(self, binder: Binder, path: str) -> tuple[int, int]:
        """Claim a linear, which has no bias; return its rows and columns."""
        linear = binder.linear(named(self.module, path))
        if linear.bias:
            binder.differ(f"{self.module}.{path} has a bias")
        return linear.rows, linear.columns

    def _merged(self, binder: Binder, target: str, rows: dict[str, int], columns: int | None = None) -> int:
        """Bind linears by their rows, merged as `target`, and return their columns, which must be one number."""
        for path, count in rows.items():
            found = self._linear(binder, path)
            columns = found[1] if columns is None else columns
            if found != (count, columns):
                binder.differ(f"{self.module}.{path} is {found[0]} x {found[1]}, not {count} x {columns}")
        binder.fill_linear(target, tuple(named(self.module, path) for path in rows), False)
        return columns or 1

    def _bound(self, binder: Binder) -> float | None:
        if not self.bound or (self.bounded and not binder.attribute(self.module, self.bounded)):
            return None
        bound = binder.attribute(self.module, self.bound)
        if isinstance(bound, (int, float)):
            return float(bound)
        if bound is not None or self.bounded:
            binder.differ(f"{self.module}.{self.bound} is {bound!r}, not a number")
        return None


@dataclass(frozen=True)
class ChannelDeltaShape(RecurrentShape):
    """Dimensions and settings of one ChannelDelta. If ranks share it, the values are one rank's.

    `width` is that of keys and of values. `decay_rank`, `gate_rank`: columns of their second linears, 0 if the first
    matrix has their rows. `bound`: the least logarithm of a decay, None without one.
    """

    hidden: int
    heads: int
    width: int
    conv: ConvShape
    norm: GatedNormShape
    decay_rank: int
    gate_rank: int
    out_bias: bool
    bound: float | None
    rounded: bool
    replaces: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        """Of the queries."""
        return self.width**-0.5

    @property
    def rows(self) -> int:
        """Of queries, of keys, of values, of the decay and of the gate."""
        return self.heads * self.width

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 3 * self.rows

    @property
    def state_values(self) -> int:
        return self.rows * self.width + self.channels * self.conv.taps

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        wide, ranks = Extent(HEADS, self.heads, self.width), {"decay": self.decay_rank, "gate": self.gate_rank}
        first = (wide, wide, wide, Extent(HEADS, self.heads), *(wide for rank in ranks.values() if not rank))
        low = sum(ranks.values())
        return (
            Matrix("in", sum(extent.length for extent in first), self.hidden, False, COLUMN, first),
            *((Matrix("low", low, self.hidden, False),) if low else ()),
            *(Matrix(target, self.rows, rank, False, COLUMN, (wide,)) for target, rank in ranks.items() if rank),
            Matrix("out", self.hidden, self.rows, self.out_bias, ROW, (wide,)),
        )

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        wide = Extent(HEADS, self.heads, self.width)
        return (
            *super().parameters,
            *self.conv.parameters((wide, wide, wide)),
            Parameter("A_log", (Extent(HEADS, self.heads),)),
            Parameter("dt_bias", (wide,)),
            Parameter("norm"),
        )

    @property
    def ops(self) -> tuple[str, ...]:
        return ("causal_conv", "linear_attention", "gated_norm")

    def of_rank(self, share: Share) -> ChannelDeltaShape:
        return replace(self, heads=share.count(HEADS), out_bias=self.out_bias and share.is_first)
