"""Blocks of diffusion models as programs over streams: an image, and the text beside it.

What is common to them is here: the shape, its modulations by a time step, and the binding of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from torch import nn

from infuse.architectures.bind import Binder
from infuse.architectures.module import ModuleShape, class_path
from infuse.architectures.norm import LAYER, Norm, NormShape
from infuse.architectures.packing import Fill
from infuse.architectures.part import WHOLE, Matrix, Parameter, PartShape
from infuse.architectures.program import ADD, ADD_NORM, IMAGE, MODULATE, NORM, Program, Step, merged

_NORMS = "diffusers.models.normalization."
ZERO, ZERO_X, CONTINUOUS = "AdaLayerNormZero", "SD35AdaLayerNormZeroX", "AdaLayerNormContinuous"
SINGLE = "AdaLayerNormZeroSingle"
# Vectors that the linear of each modulation makes: shift, scale and gate of attention, then of the MLP, then of the
# second attention; CONTINUOUS makes scale and shift.
VECTORS: Mapping[str, int] = {ZERO: 6, ZERO_X: 9, CONTINUOUS: 2, SINGLE: 3}


@dataclass(frozen=True)
class StreamsShape(ModuleShape):
    """A block that runs a program. `held` are its parts by name, as the steps name them.

    `call`: the arguments after hidden_states, in order, each with the value that it is (architectures/program.py).
    `returns`: the streams that the block returns, as a tuple if there are several.
    """

    layer: str
    program: Program
    held: tuple[tuple[str, PartShape], ...]
    call: tuple[tuple[str, str], ...]
    returns: tuple[str, ...] = (IMAGE,)

    @property
    def parts(self) -> Mapping[str, PartShape]:
        return dict(self.held)

    def with_parts(self, parts: Mapping[str, PartShape]) -> StreamsShape:
        return replace(self, held=tuple((name, parts.get(name, part)) for name, part in self.held))

    @property
    def ops(self) -> tuple[str, ...]:
        steps, held = merged(self.program), self.parts
        fused = [held[step.part] for step in steps if step.does == ADD_NORM and not step.by]
        sums = [f"add_{name}" for norm in fused for name in norm.ops]
        gated = ["gated_add"] if any(step.does == ADD and step.by for step in steps) else []
        return tuple(dict.fromkeys((*super().ops, *sums, *gated)))


@dataclass(frozen=True)
class ModulationShape(PartShape):
    """The linear from the time embedding to all shifts, scales and gates of a block, whole on each rank.

    `counts`: how many vectors of `hidden` values each stream has.
    """

    hidden: int
    counts: tuple[tuple[str, int], ...]
    bias: bool

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        rows = self.hidden * sum(count for _, count in self.counts)
        return (Matrix("linear", rows, self.hidden, self.bias, WHOLE, ()),)


@dataclass(frozen=True)
class TableShape(PartShape):
    """A table of `shape`, whose rows are added to what the time step gives for the image."""

    shape: tuple[int, ...]

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (Parameter("table"),)


@dataclass(frozen=True)
class ModulatedNormShape(PartShape):
    """A layer norm without weights, scaled and shifted by the time step."""

    eps: float

    @property
    def ops(self) -> tuple[str, ...]:
        return ("modulated_norm", "gated_add_norm")


def modulated(part: str, on: str, at: int) -> Step:
    """A modulated norm, whose shift and scale are the stream's vectors from `at` on."""
    return Step(NORM, part, on=on, by=(at + 1, at))


def gated(on: str, at: int) -> Step:
    return Step(ADD, on=on, by=(at,))


MODULATION = Step(MODULATE, "modulation")


def bind_modulation(binder: Binder, kinds: Mapping[str, tuple[str, str]]) -> dict[str, PartShape]:
    """Bind the modulations at these paths, each of a stream and a kind: their linears as one, and their norms."""
    linears, norms = [], {}
    for path, (_, kind) in kinds.items():
        found = class_path(binder.module(path))
        if found != f"{_NORMS}{kind}":
            binder.differ(f"{path} is a {found.rpartition('.')[2]}, not {kind}")
        if getattr(binder.module(path), "emb", None) is not None:
            binder.differ(f"{path} embeds the time step itself")
        linear = binder.linear(f"{path}.linear")
        linears.append(linear)
        if linear.rows != VECTORS[kind] * linear.columns:
            binder.differ(f"{path}.linear makes {linear.rows} rows of {linear.columns}, not {VECTORS[kind]} vectors")
        norms[path] = bind_modulated_norm(binder, f"{path}.norm")
    paths = tuple(f"{path}.linear" for path in kinds)
    bias = binder.all_or_no_bias(paths, linears)
    binder.fill_linear("modulation.linear", paths, bias)
    counts = tuple((stream, VECTORS[kind]) for stream, kind in kinds.values())
    return {"modulation": ModulationShape(linears[0].columns, counts, bias), **norms}


def bind_table(binder: Binder, path: str, name: str, count: int) -> TableShape:
    """Bind the table at `path`, of `count` vectors."""
    shape = tuple(binder.claim(path).shape) if path in binder.parameters else ()
    if len(shape) < 2 or prod(shape[:-1]) != count:
        binder.differ(f"{path} has shape {shape}, not {count} vectors")
    binder.fills.append(Fill(f"{name}.table", (path,)))
    return TableShape(shape)


def bind_modulated_norm(binder: Binder, path: str) -> ModulatedNormShape:
    """Bind the layer norm at `path`, which has no weights."""
    found = binder.module(path)
    if type(found) is not nn.LayerNorm or found.elementwise_affine:
        binder.differ(f"{path} is {found}, not a LayerNorm without weights")
        return ModulatedNormShape(0.0)
    return ModulatedNormShape(found.eps)


def bind_layer_norm(binder: Binder, path: str) -> NormShape:
    """Bind the layer norm at `path`; it keeps its name."""
    found = binder.module(path)
    bound = Norm(path, LAYER).bind(binder, path) if type(found) is nn.LayerNorm else None
    if bound is None:
        binder.differ(f"{path} is a {type(found).__name__}, not a LayerNorm")
        return NormShape(LAYER, 1, 0.0, 0.0, None, False)
    return bound
