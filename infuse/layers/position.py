"""Where positions come from: one class for each way in which models pass them to a layer.

`turns(inputs)` returns (cos, sin) or None, `bias(inputs, ...)` an additive bias or None. Nothing is derived from a
config: RoPE variants and ALiBi slopes are the model's own.

Suffixes: B batch, T new tokens, L keys, E rotated width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from infuse.architectures.attention import Alibi, Position, Rotary, RotaryTable
from infuse.errors import UnsupportedCall
from infuse.layers.inputs import Inputs


class Positions(nn.Module):
    """No positions in the layer: they are in the embeddings, or the model has none."""

    interleaved = False

    def turns(self, inputs: Inputs) -> tuple[Tensor, Tensor] | None:
        return None

    def bias(self, inputs: Inputs, batch: int, length: int) -> Tensor | None:
        return None


class PassedTurns(Positions):
    """The model passes (cos, sin), [B or 1, T, E] each; `in_halves` as in architectures.attention.Rotary."""

    def __init__(self, interleaved: bool, in_halves: bool):
        super().__init__()
        self.interleaved, self._in_halves = interleaved, in_halves

    def turns(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        if inputs.position_embeddings is None:
            raise missing("position_embeddings")
        if not self._in_halves:
            return inputs.position_embeddings
        cos, sin = (one.chunk(2, dim=-1)[0].repeat_interleave(2, dim=-1) for one in inputs.position_embeddings)
        return cos, sin


class TableTurns(Positions):
    """The layer looks up rows of a table [positions, sin | cos] by position ids. Pairs are interleaved (GPT-J)."""

    interleaved = True
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(0), persistent=False)

    def turns(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        if inputs.position_ids is None:
            raise missing("position_ids")
        sin_BTE, cos_BTE = self.table[inputs.position_ids].chunk(2, dim=-1)
        return cos_BTE.repeat_interleave(2, dim=-1), sin_BTE.repeat_interleave(2, dim=-1)


class PassedBias(Positions):
    """The model passes an ALiBi bias: [B H, 1, L], or [H, 1, S], of which the last L columns are used."""

    def __init__(self, argument: str):
        super().__init__()
        self._argument = argument

    def bias(self, inputs: Inputs, batch: int, length: int) -> Tensor | None:
        passed = inputs.bias
        if passed is None:
            raise missing(self._argument)
        if passed.shape[-1] > length:
            passed = passed[..., -length:]
        return passed.view(-1, inputs.heads, *passed.shape[1:])


def make_positions(position: Position) -> Positions:
    """Build the module for a declared position."""
    if isinstance(position, Rotary):
        return PassedTurns(position.interleaved, position.in_halves)
    if isinstance(position, RotaryTable):
        return TableTurns()
    return PassedBias(position.argument) if isinstance(position, Alibi) else Positions()


def missing(argument: str) -> UnsupportedCall:
    """The error for a call without the positions that the layer needs."""
    return UnsupportedCall(
        f"the layer was called without {argument}, from which it computes positions; pass what the model passes"
    )
