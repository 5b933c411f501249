"""Selective scan (Mamba-1): a state for each channel in place of keys and values. Its declaration, binding and shape.

    x, gate           = in(hidden)
    x                 = silu(causal convolution of x)
    dt, keys, queries = x_proj(x), each with a norm, if there are any
    y                 = a scan over a state of each channel (ops/selective_scan.py), with steps dt_proj(dt)
    result            = out(y)

Mamba calls keys B and queries C.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from infuse.architectures.bind import Binder, FoundLinear
from infuse.architectures.packing import Fill
from infuse.architectures.part import COLUMN, INNER, ROW, Extent, Matrix, Parameter, Share, inside, named
from infuse.architectures.parts.norm import RMS, Norm, NormShape
from infuse.architectures.parts.short_conv import CausalConv, ConvShape, RecurrentShape, check_silu

DT, KEYS, QUERIES = "dt_norm", "key_norm", "query_norm"  # names of norms in the new module


@dataclass(frozen=True)
class SelectiveScan:
    """A selective scan of the module at the path `module`. `norms`: names of norms of dt, B and C, if it has them."""

    module: str
    norms: tuple[str, ...] = ()

    def of_layer(self, layer: nn.Module, config: Any) -> SelectiveScan:
        return self

    def bind(self, binder: Binder, name: str) -> SelectiveScanShape:
        module = self.module
        found = {leaf: binder.linear(f"{module}.{leaf}") for leaf in ("in_proj", "x_proj", "dt_proj", "out_proj")}
        into, projected, step, out = found.values()
        channels, rank = step.rows, step.columns
        states = (projected.rows - rank) // 2
        self._check(binder, found, states)
        check_silu(binder, module)
        for leaf, linear in (("in", into), ("x", projected), ("out", out)):
            binder.fill_linear(named(name, leaf), (f"{module}.{leaf}_proj",), linear.bias)
        # The bias is added inside of softplus: the original reads the weight, and never calls the module.
        binder.fill_linear(named(name, "dt"), (f"{module}.dt_proj",), False)
        binder.fills.append(Fill(named(name, "dt_bias"), (f"{module}.dt_proj.bias",)))
        binder.fill_parameter(named(name, "A_log"), f"{module}.A_log", (channels, states))
        binder.fill_parameter(named(name, "D"), f"{module}.D", (channels,))
        norms = {
            target: Norm(named(module, leaf), RMS).bind(binder, named(name, target))
            for target, leaf in zip((DT, KEYS, QUERIES), self.norms, strict=False)
        }
        return SelectiveScanShape(
            hidden=into.columns,
            channels=channels,
            states=states,
            rank=rank,
            conv=CausalConv(f"{module}.conv1d").bind(binder, name, channels),
            in_bias=into.bias,
            x_bias=projected.bias,
            out_bias=out.bias,
            norms=tuple((target, norm) for target, norm in norms.items() if norm is not None),
            replaces=(module,),
        )

    def _check(self, binder: Binder, found: dict[str, FoundLinear], states: int) -> None:
        channels, rank, hidden = found["dt_proj"].rows, found["dt_proj"].columns, found["out_proj"].rows
        wanted = {
            "in_proj": (2 * channels, hidden), "x_proj": (rank + 2 * states, channels), "out_proj": (hidden, channels),
        }  # fmt: skip
        for leaf, size in wanted.items():
            linear = found[leaf]
            if (linear.rows, linear.columns) != size:
                binder.differ(
                    f"{self.module}.{leaf} is {linear.rows} x {linear.columns}; dt_proj and out_proj make it "
                    f"{size[0]} x {size[1]}"
                )
        if not found["dt_proj"].bias:
            binder.differ(f"{self.module}.dt_proj has no bias")


@dataclass(frozen=True)
class SelectiveScanShape(RecurrentShape):
    """Dimensions and settings of one selective scan. If ranks share it (`shared`), the values are one rank's.

    `rank` is dt's, `norms` are those of dt, keys and queries, which all ranks compute from the sum of what their
    channels give.
    """

    hidden: int
    channels: int
    states: int
    rank: int
    conv: ConvShape
    in_bias: bool
    x_bias: bool
    out_bias: bool
    norms: tuple[tuple[str, NormShape], ...] = ()
    replaces: tuple[str, ...] = ()
    shared: bool = False

    continues: ClassVar[bool] = False

    @property
    def state_values(self) -> int:
        return self.channels * (self.states + self.conv.taps)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        own, rows = (Extent(INNER, self.channels),), self.rank + 2 * self.states
        return (
            Matrix("in", 2 * self.channels, self.hidden, self.in_bias, COLUMN, own * 2),
            Matrix("x", rows, self.channels, self.x_bias, ROW, own),
            Matrix("dt", self.channels, self.rank, False, COLUMN, own),
            Matrix("out", self.hidden, self.channels, self.out_bias, ROW, own),
        )

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        own = (Extent(INNER, self.channels),)
        return (
            *super().parameters,
            *self.conv.parameters(own),
            *(Parameter(leaf, own) for leaf in ("dt_bias", "A_log", "D")),
            *(inside(name, parameter) for name, norm in self.norms for parameter in norm.parameters),
        )

    @property
    def ops(self) -> tuple[str, ...]:
        return tuple(
            dict.fromkeys(("causal_conv", "selective_scan", *(op for _, norm in self.norms for op in norm.ops)))
        )

    def of_rank(self, share: Share) -> SelectiveScanShape:
        x_bias, out_bias = (bias and share.is_first for bias in (self.x_bias, self.out_bias))
        return replace(self, channels=share.count(INNER), x_bias=x_bias, out_bias=out_bias, shared=True)
