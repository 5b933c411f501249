"""Blocks of diffusion models as programs over streams: an image, and the text beside it.

Holds what they share: the shape, its modulations by a time step, and the binding of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import nn

from infuse.architectures.bind import Binder
from infuse.architectures.module import ModuleShape, class_path
from infuse.architectures.packing import Fill
from infuse.architectures.part import WHOLE, Matrix, Parameter, PartShape, inside
from infuse.architectures.parts.norm import LAYER, RMS, Norm, NormShape
from infuse.architectures.program import ADD, IMAGE, MODULATE, NORM, ProgramShape, Step

_NORMS = "diffusers.models.normalization."
_LABELLED_TIME = "diffusers.models.embeddings.CombinedTimestepLabelEmbeddings"
ZERO, ZERO_X, CONTINUOUS = "AdaLayerNormZero", "SD35AdaLayerNormZeroX", "AdaLayerNormContinuous"
SINGLE, SHIFT = "AdaLayerNormZeroSingle", "AdaLayerNormShift"
_PLACES: Mapping[str, str] = {SHIFT: "diffusers.models.transformers.hunyuan_transformer_2d."}
NORMS: Mapping[str, str] = {
    "torch.nn.modules.normalization.LayerNorm": LAYER,
    f"{_NORMS}FP32LayerNorm": LAYER,
    f"{_NORMS}RMSNorm": RMS,
}
# Vectors that the linear of each modulation makes: shift, scale and gate of attention, then of the MLP, then of the
# second attention; CONTINUOUS makes scale and shift; SHIFT makes one, for a norm with weights.
VECTORS: Mapping[str, int] = {ZERO: 6, ZERO_X: 9, CONTINUOUS: 2, SINGLE: 3, SHIFT: 1}


@dataclass(frozen=True)
class StreamsShape(ProgramShape, ModuleShape):
    """A block over several streams.

    `call`: the arguments after hidden_states, in order, each with the value that it is (architectures/program.py).
    `returns`: the streams that the block returns, as a tuple if there are several.
    """

    layer: str
    call: tuple[tuple[str, str], ...]
    returns: tuple[str, ...] = (IMAGE,)


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
    """A table of `shape`; its rows are added to the image's vectors from the time step."""

    shape: tuple[int, ...]

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (Parameter("table"),)


@dataclass(frozen=True)
class ModulatedNormShape(PartShape):
    """A layer norm or RMS norm without weights, scaled and shifted by the time step."""

    kind: str
    eps: float

    @property
    def ops(self) -> tuple[str, ...]:
        return ("modulated_norm", "gated_add_norm")


@dataclass(frozen=True)
class LabelledTimeShape(PartShape):
    """The embedding of a time step and a class: `channels` of a sinusoid by two linears, plus a row of a table.

    `flips`: cosines come first. `shift` is that of the frequencies.
    """

    hidden: int
    channels: int
    flips: bool
    shift: float

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        first = Matrix("linear_1", self.hidden, self.channels, True, WHOLE, ())
        return first, replace(first, target="linear_2", inputs=self.hidden)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (*super().parameters, Parameter("table"))


@dataclass(frozen=True)
class EmbeddingNormShape(ModulatedNormShape):
    """A modulated norm that embeds the time step and a class itself."""

    emb: LabelledTimeShape

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return tuple(inside("emb", matrix) for matrix in self.emb.matrices)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(inside("emb", parameter) for parameter in self.emb.parameters)


@dataclass(frozen=True)
class SkipShape(PartShape):
    """linear(norm([x | skip])) with `skip` from an earlier block: from 2 * `hidden` values to `hidden`."""

    hidden: int
    norm: NormShape
    bias: bool

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return (Matrix("linear", self.hidden, 2 * self.hidden, self.bias),)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (*super().parameters, *(inside("norm", parameter) for parameter in self.norm.parameters))

    @property
    def ops(self) -> tuple[str, ...]:
        return self.norm.ops


def modulated(part: str, on: str, at: int) -> Step:
    """A modulated norm, whose shift and scale are the stream's vectors from `at` on."""
    return Step(NORM, part, on=on, by=(at + 1, at))


def gated(on: str, at: int) -> Step:
    return Step(ADD, on=on, by=(at,))


MODULATION = Step(MODULATE, "modulation")


def bind_modulation(
    binder: Binder, kinds: Mapping[str, tuple[str, str]], *, embeds: bool = False
) -> dict[str, PartShape]:
    """Bind the modulations at these paths, each of a stream and a kind: their linears as one, and their norms.

    `embeds`: they embed the time step and a class themselves.
    """
    linears, norms = [], dict[str, PartShape]()
    for path, (_, kind) in kinds.items():
        class_name = class_path(binder.module(path))
        if class_name != f"{_PLACES.get(kind, _NORMS)}{kind}":
            binder.differ(f"{path} is a {class_name.rpartition('.')[2]}, not {kind}")
        if (getattr(binder.module(path), "emb", None) is not None) != embeds:
            binder.differ(f"{path} {'does not embed' if embeds else 'embeds'} the time step itself")
        linear = binder.linear(f"{path}.linear")
        linears.append(linear)
        if linear.rows != VECTORS[kind] * linear.columns:
            binder.differ(f"{path}.linear makes {linear.rows} rows of {linear.columns}, not {VECTORS[kind]} vectors")
        if kind == SHIFT:
            norms[path] = bind_layer_norm(binder, f"{path}.norm", path)
        else:
            norms[path] = norm = bind_modulated_norm(binder, f"{path}.norm")
            if embeds:
                norms[path] = EmbeddingNormShape(norm.kind, norm.eps, _bind_labelled_time(binder, f"{path}.emb"))
    paths = tuple(f"{path}.linear" for path in kinds)
    bias = binder.all_or_no_bias(paths, linears)
    binder.fill_linear("modulation.linear", paths, bias)
    counts = tuple((stream, VECTORS[kind]) for stream, kind in kinds.values())
    return {"modulation": ModulationShape(linears[0].columns, counts, bias), **norms}


def _bind_labelled_time(binder: Binder, path: str) -> LabelledTimeShape:
    """Bind the embedding of a time step and a class at `path`; it keeps its name."""
    embedding: Any = binder.module(path)
    if class_path(embedding) != _LABELLED_TIME:
        binder.differ(f"{path} is a {type(embedding).__name__}, not diffusers' CombinedTimestepLabelEmbeddings")
        return LabelledTimeShape(1, 2, False, 0.0)
    embedder, sinusoid = f"{path}.timestep_embedder", embedding.time_proj
    first, second = (binder.linear(f"{embedder}.linear_{number}") for number in (1, 2))
    for number in (1, 2):
        binder.fill_linear(f"{path}.linear_{number}", (f"{embedder}.linear_{number}",), True)
    table = f"{path}.class_embedder.embedding_table.weight"
    binder.claim(table)
    binder.fills.append(Fill(f"{path}.table", (table,)))
    act = type(binder.attribute(embedder, "act"))
    if act is not nn.SiLU or binder.attribute(embedder, "post_act") is not None or not (first.bias and second.bias):
        binder.differ(f"{embedder} is not two linears with a SiLU between them")
    if sinusoid.scale != 1 or sinusoid.num_channels % 2:
        binder.differ(f"{path}.time_proj has scale {sinusoid.scale} and {sinusoid.num_channels} channels")
    return LabelledTimeShape(second.rows, first.columns, sinusoid.flip_sin_to_cos, float(sinusoid.downscale_freq_shift))


def bind_table(binder: Binder, path: str, name: str, count: int) -> TableShape:
    """Bind the table at `path`, of `count` vectors."""
    shape = tuple(binder.claim(path).shape) if path in binder.parameters else ()
    if len(shape) < 2 or prod(shape[:-1]) != count:
        binder.differ(f"{path} has shape {shape}, not {count} vectors")
    binder.fills.append(Fill(f"{name}.table", (path,)))
    return TableShape(shape)


def bind_modulated_norm(binder: Binder, path: str) -> ModulatedNormShape:
    """Bind the norm at `path`, which has no weights."""
    norm = binder.module(path)
    kind = NORMS.get(class_path(norm))
    if kind is None or norm.elementwise_affine:  # type: ignore[union-attr]
        binder.differ(f"{path} is {norm}, not a LayerNorm or RMSNorm without weights")
        return ModulatedNormShape(LAYER, 0.0)
    return ModulatedNormShape(kind, norm.eps)  # type: ignore[arg-type, union-attr]


def bind_layer_norm(binder: Binder, path: str, at: str | None = None) -> NormShape:
    """Bind the layer norm at `path`, which goes to `path` in the new module or to `at`."""
    norm = binder.module(path)
    bound = Norm(path, LAYER).bind(binder, at or path) if NORMS.get(class_path(norm)) == LAYER else None
    if bound is None:
        binder.differ(f"{path} is a {type(norm).__name__}, not a LayerNorm")
        return NormShape(LAYER, 1, 0.0, 0.0, None, False)
    return bound


def bind_skip(binder: Binder, name: str) -> SkipShape:
    """Bind skip_norm and skip_linear."""
    linear = binder.linear("skip_linear")
    if linear.columns != 2 * linear.rows:
        binder.differ(f"skip_linear makes {linear.rows} rows of {linear.columns} columns")
    binder.fill_linear(f"{name}.linear", ("skip_linear",), linear.bias)
    return SkipShape(linear.rows, bind_layer_norm(binder, "skip_norm", f"{name}.norm"), linear.bias)
