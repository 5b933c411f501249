"""Blocks of diffusion models, which run a program over streams (diffusion/shapes/streams.py), and their modulations.

Suffixes: B batch, T tokens, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infuse import ops
from infuse.architectures.parts.norm import LAYER, NormShape
from infuse.architectures.program import (
    CAT,
    EMBED,
    EMPTY,
    IMAGE,
    JOINT,
    LABEL,
    MODULATE,
    NORM,
    SKIP,
    TEXT,
    TIME,
    carried,
    merged,
)
from infuse.diffusion.layers.unheard import Unheard
from infuse.diffusion.shapes.streams import (
    EmbeddingNormShape,
    LabelledTimeShape,
    ModulatedNormShape,
    ModulationShape,
    SkipShape,
    StreamsShape,
    TableShape,
)
from infuse.ground.errors import UnsupportedCall
from infuse.layers.build_context import BuildContext
from infuse.layers.calls.contract import named, refuse_unknown
from infuse.layers.gradient import InferenceModule, is_recorded, unrecorded
from infuse.layers.linear import direct
from infuse.layers.norm import Norm
from infuse.layers.program import Streams, compiled_streams

# The values that steps need.
_NEEDED: Mapping[str, str] = MappingProxyType({MODULATE: TIME, EMBED: LABEL, JOINT: TEXT, CAT: TEXT, SKIP: SKIP})


class Modulation(nn.Module):
    """All shifts, scales and gates of a block, by stream, each [B, C], from its time embedding [B, C]."""

    def __init__(self, shape: ModulationShape, context: BuildContext):
        super().__init__()
        (matrix,) = shape.matrices
        self.linear, self.shape = context.linear(matrix), shape

    def forward(self, temb_BC: Tensor) -> dict[str, tuple[Tensor, ...]]:
        vectors, found, at = direct(self.linear, F.silu(temb_BC)).split(self.shape.hidden, dim=-1), {}, 0
        for stream, count in self.shape.counts:
            found[stream] = vectors[at : at + count]
            at += count
        return found


class Table(nn.Module):
    """The rows of the table plus those that the time step gives, in float32, each [B, C] or [B, T, C].

    It gives rows * C values for the whole image, or for each token.
    """

    def __init__(self, shape: TableShape, context: BuildContext):
        super().__init__()
        self.table = nn.Parameter(torch.empty(shape.shape), requires_grad=False)

    def forward(self, time: Tensor) -> dict[str, tuple[Tensor, ...]]:
        rows = self.table.flatten(0, -2)
        vectors = rows + time.float().reshape(time.shape[0], -1, *rows.shape)
        return {IMAGE: (vectors[:, 0] if vectors.shape[1] == 1 else vectors).unbind(dim=-2)}


class ModulatedNorm(Unheard):
    """norm(x) * (1 + scale) + shift, alone or of a gated sum, which it also returns."""

    def __init__(self, shape: ModulatedNormShape, context: BuildContext):
        super().__init__()
        bodies, self._norm = context.bodies, (shape.eps, shape.kind == LAYER)
        self._alone = ops.modulated_norm.bound(bodies.get("modulated_norm", ops.REFERENCE))
        self._fused = ops.gated_add_norm.bound(bodies.get("gated_add_norm", ops.REFERENCE))

    def forward(self, x_BTC: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        x, scale, shift = _by_row(x_BTC, scale, shift)
        return self._alone(x, scale, shift, *self._norm).view_as(x_BTC)

    def add(
        self, x_BTC: Tensor, residual_BTC: Tensor, gate: Tensor, scale: Tensor, shift: Tensor
    ) -> tuple[Tensor, Tensor]:
        x, gate, scale, shift = _by_row(x_BTC, gate, scale, shift)
        total, y = self._fused(x, gate, residual_BTC.reshape(x.shape), scale, shift, *self._norm)
        return total.view_as(x_BTC), y.view_as(x_BTC)


class ShiftedNorm(Unheard, Norm):
    """A norm whose result the block shifts by the time step."""


class LabelledTime(nn.Module):
    """The embedding [B, C] of time steps [B] and classes [B], in which the block and its model read them."""

    def __init__(self, shape: LabelledTimeShape, context: BuildContext):
        super().__init__()
        first, second = shape.matrices
        self.linear_1, self.linear_2 = context.linear(first), context.linear(second)
        self.table = nn.Parameter(torch.empty(0, shape.hidden), requires_grad=False)
        self._channels, self._flips, self._shift = shape.channels, shape.flips, shape.shift

    def forward(self, timestep: Tensor, class_labels: Tensor, hidden_dtype: torch.dtype) -> Tensor:
        half = self._channels // 2
        powers = torch.arange(half, dtype=torch.float32, device=timestep.device) / (half - self._shift)
        angles = timestep[:, None].float() * torch.exp(-math.log(10000) * powers)
        waves = (angles.cos(), angles.sin()) if self._flips else (angles.sin(), angles.cos())
        time = direct(self.linear_1, torch.cat(waves, dim=-1).to(hidden_dtype))
        return direct(self.linear_2, F.silu(time)) + F.embedding(class_labels, self.table)


class EmbeddingNorm(ModulatedNorm):
    """A modulated norm with the embedding of its time step, by the name that models ask it for."""

    def __init__(self, shape: EmbeddingNormShape, context: BuildContext):
        super().__init__(shape, context)
        self.emb = LabelledTime(shape.emb, context.of("emb"))


class Skip(nn.Module):
    """linear(norm([x, skip])), of [B, T, C] each."""

    def __init__(self, shape: SkipShape, context: BuildContext):
        super().__init__()
        (matrix,) = shape.matrices
        self.norm, self.linear = Norm(shape.norm, context.bodies), context.linear(matrix)

    def forward(self, x_BTC: Tensor, skip_BTC: Tensor) -> Tensor:
        return direct(self.linear, direct(self.norm, torch.cat((x_BTC, skip_BTC), dim=-1)))


def _by_row(x_BTC: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    """x and the vectors [B, C] that modulate it. Vectors of each token [B, T, C] make it B T rows of one token."""
    if vectors[0].dim() == 2:
        return x_BTC, *vectors
    return x_BTC.reshape(-1, 1, x_BTC.shape[-1]), *(vector.flatten(0, 1) for vector in vectors)


class StreamsBlock(InferenceModule):
    """forward(hidden_states [B, T, C], ...) -> what the original returns."""

    def __init__(self, shape: StreamsShape, context: BuildContext):
        super().__init__()
        self.shape, self._steps = shape, compiled_streams(carried(merged(shape.program)))
        shifted = {step.part for step in shape.program if step.does == NORM and len(step.by) == 1}
        for name, part in shape.parts.items():
            if name in shifted and isinstance(part, NormShape):
                self.add_module(name, ShiftedNorm(part, context.bodies))
            else:
                self.add_module(name, context.make(part, context.of(name)))
        self._add = ops.gated_add.bound(context.bodies.get("gated_add", ops.REFERENCE))
        self._arguments = tuple(name for name, _ in shape.call)
        needed = {_NEEDED[step.does] for step in shape.program if step.does in _NEEDED}
        self._needed = tuple((name, value) for name, value in shape.call if value in needed)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and is_recorded(self, hidden_states):
            return unrecorded(StreamsBlock.forward, self, hidden_states, *args, **kwargs)
        values = self._values(args, kwargs)
        values[IMAGE] = hidden_states
        streams, parts = Streams(values, self.gated_add), self._modules
        for step in self._steps:
            step(streams, parts)
        found = tuple(streams.of[stream].x for stream in self.shape.returns)
        return found if len(found) > 1 else found[0]

    def gated_add(self, x_BTC: Tensor, gate: Tensor, residual_BTC: Tensor) -> Tensor:
        x, gate = _by_row(x_BTC, gate)
        return self._add(x, gate, residual_BTC.reshape(x.shape)).view_as(x_BTC)

    def _values(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The values of a call's arguments. UnsupportedCall for arguments that are missing or not known."""
        layer, arguments = self.shape.layer, self._arguments
        given = named(arguments, args, kwargs, layer)
        unknown = {name: value for name, value in given.items() if name not in arguments}
        refuse_unknown(layer, (), unknown, arguments)
        values = {value: given.get(name) for name, value in self.shape.call}
        refuse_unknown(f"the attention of {layer}", (), values.pop(EMPTY, None) or {})
        for name, value in self._needed:
            if values[value] is None:
                raise UnsupportedCall(f"{layer} was called without {name}; pass what the transformer passes")
        return values
