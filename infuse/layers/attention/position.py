"""Position sources: one class for each way in which models pass positions to a layer.

`cos_sin(inputs)` returns (cos, sin) or None, `bias(inputs, ...)` an additive bias or None. Nothing is derived from a
config: RoPE variants and ALiBi slopes are the model's own.

Suffixes: B batch, H heads, T new tokens, L keys, E rotated width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infuse.architectures.parts.attention import (
    Alibi,
    Growth,
    PassedScores,
    Position,
    RelativeBias,
    Rotary,
    RotaryTable,
)
from infuse.ground.errors import UnsupportedCall
from infuse.layers.calls.inputs import Inputs


class Positions(nn.Module):
    """Positions are in the embeddings, or the model has none."""

    interleaved = False

    def cos_sin(self, inputs: Inputs) -> tuple[Tensor, Tensor] | None:
        return None

    def bias(self, inputs: Inputs, batch: int, length: int) -> Tensor | None:
        return None

    def added(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the mask in the form that attention takes."""
        return mask


class PassedCosSin(Positions):
    """The model passes (cos, sin), [B or 1, T, E or E/2] each, as described by architectures.parts.attention.Rotary."""

    def __init__(self, position: Rotary):
        super().__init__()
        self.interleaved, self._in_halves, self._once = position.interleaved, position.in_halves, position.once
        self._sin_first, self._flat, self.prefix = position.sin_first, position.flat, position.prefix
        self._is_complex, self._optional = position.is_complex, position.optional

    def cos_sin(self, inputs: Inputs) -> tuple[Tensor, Tensor] | None:
        if inputs.position_embeddings is None:
            if self._optional:
                return None
            raise missing("position_embeddings")
        cos, sin = self._passed(inputs.position_embeddings)
        if cos.dim() != 3 - self._flat:
            raise _of_other_axes("cos and sin", cos, "[tokens, width]" if self._flat else "[batch or 1, tokens, width]")
        if self._flat:
            cos, sin = cos[None], sin[None]
        if self._in_halves:
            cos, sin = cos.chunk(2, dim=-1)[0], sin.chunk(2, dim=-1)[0]
        elif not self._once:
            return cos, sin
        if self.interleaved:
            return cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)

    def _passed(self, passed: tuple[Tensor, Tensor] | Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin as they are passed."""
        is_one = isinstance(passed, Tensor)
        if is_one != self._is_complex or (is_one and not passed.is_complex()):  # type: ignore[union-attr]
            wanted = "one complex tensor" if self._is_complex else "(cos, sin)"
            raise UnsupportedCall(
                f"position_embeddings: {type(passed).__name__} was passed; pass what the model passes, {wanted}"
            )
        if isinstance(passed, Tensor):
            return passed.real, passed.imag
        first, second = passed
        return (second, first) if self._sin_first else (first, second)

    def completed(self, passed: tuple[Tensor, Tensor], tokens: int) -> tuple[Tensor, Tensor]:
        """Put rows that turn nothing before what is passed, so that there is one for each of the tokens."""
        missing_rows = tokens - passed[0].shape[-2]
        if missing_rows < 0:
            raise _of_other_axes("cos and sin", passed[0], f"[..., at most {tokens} tokens, width]")
        ones = (0.0, 1.0) if self._sin_first else (1.0, 0.0)
        first, second = (
            F.pad(table, (0, 0, missing_rows, 0), value=value) for table, value in zip(passed, ones, strict=True)
        )
        return first, second


class TableCosSin(Positions):
    """The layer looks up rows of a table [positions, sin | cos] by position ids. Pairs are interleaved (GPT-J)."""

    interleaved = True
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(0), persistent=False)

    def cos_sin(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        if inputs.position_ids is None:
            raise missing("position_ids")
        if inputs.position_ids.dim() != 2:
            raise _of_other_axes("position_ids", inputs.position_ids, "[batch or 1, tokens]")
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


class LearnedBias(Positions):
    """T5's bias: look it up by distance in a table [buckets, H], unless the model passes another layer's bias.

    A layer with neither adds zeros.
    """

    table: nn.Parameter | None

    def __init__(self, position: RelativeBias, heads: int):
        super().__init__()
        assert isinstance(position.buckets, int) and isinstance(position.farthest, int), position
        self._buckets, self._farthest, self._heads = position.buckets, position.farthest, heads
        self._causal = position.causal
        empty = torch.empty(position.buckets, heads) if position.table else None
        self.register_parameter("table", None if empty is None else nn.Parameter(empty, requires_grad=False))

    def bias(self, inputs: Inputs, batch: int, length: int) -> Tensor | None:
        bias = inputs.bias  # of all keys of a static cache, also where only those of its first prompt are attended to
        return bias if bias is None or bias.shape[-1] <= length else bias[..., :length]

    def added(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Return an additive mask, because T5 adds it to the bias: a fully masked row then sees all keys alike."""
        return additive(mask, dtype)

    def forward(self, x_BTC: Tensor, start: Any = 0, length: int | None = None) -> Tensor:
        """Return the bias [1, H, T, L] for the tokens of x, the first of which is number `start` of the L keys."""
        tokens, table = x_BTC.shape[1], self.table
        if table is None:
            return x_BTC.new_zeros(1, self._heads, tokens, length or tokens)
        if self._causal:
            places = torch.arange(length or tokens, device=table.device)
            return table.t()[:, self._bucket(places - (start + torch.arange(tokens, device=table.device))[:, None])][
                None
            ]
        distances = torch.arange(1 - tokens, tokens, device=table.device)
        by_distance = table.t()[:, self._bucket(distances)]  # [H, 2 T - 1]
        return by_distance.unfold(1, tokens, 1).flip(1)[None]

    def _bucket(self, distances: Tensor) -> Tensor:
        """Return the bucket of each distance, key minus query position (Raffel et al. 2020, section 2.1).

        Without causal order half of the buckets are for keys after the query. Half of the rest hold one distance each,
        and the others grow logarithmically up to `farthest`.
        """
        count = self._buckets if self._causal else self._buckets // 2
        near, far = count // 2, -distances.clamp(max=0) if self._causal else distances.abs()
        grown = torch.log(far.clamp(min=1).float() / near) / math.log(self._farthest / near) * (count - near)
        grown = (near + grown.to(torch.long)).clamp(max=count - 1)
        buckets = torch.where(far < near, far, grown)
        return buckets if self._causal else buckets + count * (distances > 0)


class PassedScoreBias(Positions):
    """The model passes a bias of the scores [B or 1, H, T, L], or none."""

    def bias(self, inputs: Inputs, batch: int, length: int) -> Tensor | None:
        return inputs.bias


def make_positions(position: Position, heads: int) -> Positions:
    """Build the module for a declared position; `heads` are the query heads of all ranks."""
    if isinstance(position, PassedScores):
        return PassedScoreBias()
    if isinstance(position, RelativeBias):
        return LearnedBias(position, heads)
    if isinstance(position, Rotary):
        return PassedCosSin(position)
    if isinstance(position, RotaryTable):
        return TableCosSin()
    return PassedBias(position.argument) if isinstance(position, Alibi) else Positions()


def grown(growth: Growth, inputs: Inputs, counted_BT: Tensor | None = None) -> Tensor:
    """The factors of queries, [B or 1, T, 1] in float32; `counted_BT`: the tokens' indices in the cache."""
    positions_BT = counted_BT if growth.counted else inputs.position_ids
    if positions_BT is None:
        raise missing("position_ids")
    passed = torch.floor((positions_BT + growth.offset) / growth.every)
    return (1 + growth.beta * torch.log(1 + passed))[..., None]


def missing(argument: str) -> UnsupportedCall:
    """Return the error for a call without the positions that the layer needs."""
    return UnsupportedCall(
        f"the layer was called without {argument}, from which it computes positions; pass what the model passes"
    )


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a boolean mask, True where it is seen, as one that is added to scores; an additive one as it is."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def _of_other_axes(what: str, tensor: Tensor, wanted: str) -> UnsupportedCall:
    return UnsupportedCall(
        f"{what} have shape {list(tensor.shape)}, not {wanted}: give position_ids [batch or 1, tokens]"
    )
