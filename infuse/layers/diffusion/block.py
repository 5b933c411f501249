"""Blocks of diffusion models, which run a program over streams (architectures/streams.py), and their modulations.

Suffixes: B batch, T tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infuse import ops
from infuse.architectures.dit import HeadsShape
from infuse.architectures.image_attention import ImageAttentionShape
from infuse.architectures.mlp import MLPShape
from infuse.architectures.norm import NormShape
from infuse.architectures.part import PartShape
from infuse.architectures.program import CAT, EMPTY, IMAGE, JOINT, MODULATE, TEXT, TIME, carried, merged
from infuse.architectures.streams import ModulatedNormShape, ModulationShape, StreamsShape, TableShape
from infuse.errors import UnsupportedCall
from infuse.layers.contract import named, refuse_unknown
from infuse.layers.diffusion.heads import Heads
from infuse.layers.diffusion.image_attention import ImageAttention
from infuse.layers.gradient import InferenceModule, is_recorded, unrecorded
from infuse.layers.linear import direct
from infuse.layers.mlp import MLP
from infuse.layers.norm import Norm
from infuse.layers.program import run_streams
from infuse.layers.surroundings import Surroundings

_NEEDED: Mapping[str, str] = MappingProxyType({MODULATE: TIME, JOINT: TEXT, CAT: TEXT})  # values that steps need


class Modulation(nn.Module):
    """All shifts, scales and gates of a block, by stream, each [B, C], from its time embedding [B, C]."""

    def __init__(self, shape: ModulationShape, surroundings: Surroundings):
        super().__init__()
        (matrix,) = shape.matrices
        self.linear, self.shape = surroundings.linear(matrix), shape

    def forward(self, temb_BC: Tensor) -> dict[str, tuple[Tensor, ...]]:
        vectors, found, at = direct(self.linear, F.silu(temb_BC)).split(self.shape.hidden, dim=-1), {}, 0
        for stream, count in self.shape.counts:
            found[stream] = vectors[at : at + count]
            at += count
        return found


class Table(nn.Module):
    """The rows of the table plus those that the time step gives [B, rows * C], each [B, C]."""

    def __init__(self, shape: TableShape, surroundings: Surroundings):
        super().__init__()
        self.table = nn.Parameter(torch.empty(shape.shape), requires_grad=False)

    def forward(self, time: Tensor) -> dict[str, tuple[Tensor, ...]]:
        rows = self.table.flatten(0, -2)
        return {IMAGE: (rows + time.reshape(-1, *rows.shape)).unbind(dim=1)}


class ModulatedNorm(nn.Module):
    """norm(x) * (1 + scale) + shift, alone or of a gated sum, which it also returns."""

    def __init__(self, shape: ModulatedNormShape, surroundings: Surroundings):
        super().__init__()
        bodies, self._eps = surroundings.bodies, shape.eps
        self._alone = ops.modulated_norm.bound(bodies.get("modulated_norm", ops.REFERENCE))
        self._fused = ops.gated_add_norm.bound(bodies.get("gated_add_norm", ops.REFERENCE))

    def forward(self, x_BTC: Tensor, scale_BC: Tensor, shift_BC: Tensor) -> Tensor:
        return self._alone(x_BTC, scale_BC, shift_BC, self._eps)

    def add(
        self, x_BTC: Tensor, residual_BTC: Tensor, gate_BC: Tensor, scale_BC: Tensor, shift_BC: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self._fused(x_BTC, gate_BC, residual_BTC, scale_BC, shift_BC, self._eps)


_LAYERS: Mapping[type[PartShape], Callable[[Any, Surroundings], nn.Module]] = MappingProxyType(
    {
        ModulationShape: Modulation,
        TableShape: Table,
        ModulatedNormShape: ModulatedNorm,
        NormShape: lambda shape, surroundings: Norm(shape, surroundings.bodies),
        HeadsShape: Heads,
        ImageAttentionShape: ImageAttention,
        MLPShape: MLP,
    }
)


class StreamsBlock(InferenceModule):
    """forward(hidden_states [B, T, C], ...) -> what the original returns."""

    def __init__(self, shape: StreamsShape, surroundings: Surroundings):
        super().__init__()
        self.shape, self._program = shape, carried(merged(shape.program))
        for name, part in shape.parts.items():
            self.add_module(name, _LAYERS[type(part)](part, surroundings.of(name)))
        self.gated_add = ops.gated_add.bound(surroundings.bodies.get("gated_add", ops.REFERENCE))
        self._arguments = tuple(name for name, _ in shape.call)
        needed = {_NEEDED[step.does] for step in shape.program if step.does in _NEEDED}
        self._needed = tuple((name, value) for name, value in shape.call if value in needed)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and is_recorded(self, hidden_states):
            return unrecorded(StreamsBlock.forward, self, hidden_states, *args, **kwargs)
        values = self._values(args, kwargs)
        values[IMAGE] = hidden_states
        run_streams(self._program, self, values)
        found = tuple(values[stream] for stream in self.shape.returns)
        return found if len(found) > 1 else found[0]

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
