"""Feed-forward parts: their declarations in a spec, their binding to a layer, and their shape."""

from __future__ import annotations

from dataclasses import dataclass, replace

from infuse.architectures.bind import Binder
from infuse.architectures.part import COLUMN, INNER, ROW, Extent, Matrix, Parameter, PartShape, Share, inside, named
from infuse.architectures.parts.multipliers import Factors, Multipliers
from infuse.architectures.parts.norm import RMS, Norm, NormShape
from infuse.ground.activations import Act
from infuse.ground.errors import SpecMismatch
from infuse.parallel.slices import Span


@dataclass(frozen=True)
class MLP:
    """down(act(up(x)))."""

    up: str
    down: str
    activation: str | Act = "hidden_act"

    def bind(self, binder: Binder, name: str) -> MLPShape:
        return _bind(binder, name, (self.up,), self.down, self.activation, gated=False)


@dataclass(frozen=True)
class GatedMLP:
    """down(norm(act(gate(x)) * up(x))); most have no such norm. `multipliers`: with those of gate and up."""

    gate: str
    up: str
    down: str
    activation: str | Act = "hidden_act"
    norm: Norm | None = None
    multipliers: Multipliers = Multipliers()

    @classmethod
    def at(cls, path: str, activation: str | Act = "hidden_act") -> GatedMLP:
        """The MLP at `path` whose linears have the usual names."""
        return cls(f"{path}.gate_proj", f"{path}.up_proj", f"{path}.down_proj", activation)

    def bind(self, binder: Binder, name: str) -> MLPShape:
        bound = _bind(binder, name, (self.gate, self.up), self.down, self.activation, gated=True)
        norm = None if self.norm is None else self.norm.bind(binder, f"{name}.norm")
        return replace(bound, norm=norm, factors=self.multipliers.bind(binder, 2))


@dataclass(frozen=True)
class PackedGatedMLP:
    """GatedMLP with [gate | up], or `swapped` [up | gate], in one linear."""

    gate_up: str
    down: str
    activation: str | Act = "hidden_act"
    swapped: bool = False

    def bind(self, binder: Binder, name: str) -> MLPShape:
        return _bind(binder, name, (self.gate_up,), self.down, self.activation, gated=True, swapped=self.swapped)


def _bind(
    binder: Binder, name: str, paths: tuple[str, ...], down_path: str, activation: str | Act, *, gated: bool,
    swapped: bool = False,
) -> MLPShape:  # fmt: skip
    """Bind an MLP whose first linear is merged from the linears at `paths`."""
    down = binder.linear(down_path)
    linears = [binder.linear(path) for path in paths]
    rows = sum(linear.rows for linear in linears)
    if rows != down.columns * (2 if gated else 1):
        binder.differ(f"{' and '.join(paths)} make {rows} rows; {down_path} takes {down.columns} columns")
    bias = binder.all_or_no_bias(paths, linears)
    halves = (Span(0, rows // 2, rows), Span(0, 0, rows // 2)) if swapped else ()
    binder.fill_linear(named(name, "up"), paths, bias, rows=halves)
    binder.fill_linear(named(name, "down"), (down_path,), down.bias)
    return MLPShape(linears[0].columns, down.columns, gated, binder.activation(activation), bias, down.bias)


@dataclass(frozen=True)
class MLPShape(PartShape):
    """Dimensions and settings of one MLP. If `gated`, its first linear is [gate | up]. `norm`: of inner features.

    `wide`: its last matrix and its result are in float32 in a model of 16 bits.
    """

    hidden: int
    inner: int
    gated: bool
    activation: str
    in_bias: bool
    out_bias: bool
    norm: NormShape | None = None
    factors: Factors | None = None
    wide: bool = False

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        inner = Extent(INNER, self.inner)
        merged = (inner, inner) if self.gated else (inner,)
        rows = sum(extent.length for extent in merged)
        up = Matrix("up", rows, self.hidden, self.in_bias, COLUMN, merged)
        down = Matrix("down", self.hidden, self.inner, self.out_bias, ROW, (inner,))
        return up, down

    @property
    def ops(self) -> tuple[str, ...]:
        """The op after the first product; both run as one op if nothing comes between them."""
        return ("gated_activation" if self.gated else "activation", *(self.norm.ops if self.norm else ()))

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        of_norm = () if self.norm is None else self.norm.parameters
        inner = (Extent(INNER, self.inner),)
        return (*super().parameters, *(replace(inside("norm", parameter), extents=inner) for parameter in of_norm))

    def of_rank(self, share: Share) -> MLPShape:
        norm, inner = self.norm, share.count(INNER)
        if norm is not None and (norm.kind != RMS or norm.weight is None):
            raise SpecMismatch("MLP", ["has a norm over the inner features of all ranks that is no RMS with a weight"])
        if norm is not None:
            norm = replace(norm, width=inner, weight=(inner,), whole=norm.width)
        return replace(self, inner=inner, out_bias=self.out_bias and share.is_first, norm=norm)
