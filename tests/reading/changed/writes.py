"""Layers that write into tensors in place, by ways that an operation's first argument does not tell."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.reading.cases import EITHER, LEFT, Case
from tests.reading.layers import Config, Layer, Pieces

LIMIT = 0.5


class IntoChunk(Layer):
    """The first half of its result is clamped."""

    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        y = super().both(x, given)
        first, _ = y.chunk(2, dim=-1)
        first.clamp_(-LIMIT, LIMIT)
        return y


class IntoChunkOfInput(Layer):
    """The caller's tensor is not as it was."""

    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        y = super().both(x, given)
        x.chunk(2, dim=-1)[0].zero_()
        return y


class IntoUnbound(Layer):
    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        y = super().both(x, given)
        y.unbind(1)[0].mul_(1.5)
        return y


class IntoChunkOfBuffer(Layer):
    """It counts its calls."""

    def __init__(self, config: Config, layer_idx: int, pieces: Pieces):
        super().__init__(config, layer_idx, pieces)
        self.register_buffer("calls", torch.zeros(2))

    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        first, _ = self.calls.chunk(2)
        first.add_(1.0)
        return super().both(x, given)


class IntoOut(Layer):
    """What is written is the last argument, which shares the memory of the result."""

    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        y = super().both(x, given)
        torch.clamp(y * 1.0, -LIMIT, LIMIT, out=y.detach())
        return y


class IntoNewOut(Layer):
    """What is written is dropped."""

    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        x = x + self.attended(x, given)
        torch.add(x, self.transformed(x), out=torch.empty_like(x))
        return x


class IntoDropped(Layer):
    """A dropout that drops nothing passes its input on, and no copy."""

    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        y = super().both(x, given)
        F.dropout(y, 0.1, self.training).detach().clamp_(-LIMIT, LIMIT)
        return y


class IntoCopy(Layer):
    """What is written is a copy that nobody reads."""

    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        y = super().both(x, given)
        y.to(y.dtype, copy=True).clamp_(-LIMIT, LIMIT)
        return y


CASES = (
    Case("writes into a chunk", LEFT, layer=IntoChunk, words=("writes", "in place")),
    Case("writes out", LEFT, layer=IntoOut, words=("writes", "in place")),
    Case("writes what a dropout passes on", EITHER, layer=IntoDropped, words=("clamp",)),
    Case("writes a copy", EITHER, layer=IntoCopy, words=("clamp",), like=None),
)
VARIANTS = (
    Case("writes into a chunk of its input", LEFT, layer=IntoChunkOfInput, words=("writes", "in place"), like=None),
    Case("writes into what it unbinds", LEFT, layer=IntoUnbound, words=("writes", "in place")),
    Case("writes into a chunk of a buffer", LEFT, layer=IntoChunkOfBuffer, words=("writes", "state"), like=None),
    Case("writes out into a new tensor", LEFT, layer=IntoNewOut, words=("writes", "in place", "unused", "mlp")),
)
