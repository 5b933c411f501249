"""Changed rotary embeddings, and other positions inside of layers. See tests/reading/layers.py for the legend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.reading.cases import EITHER, LEFT, READ, Case
from tests.reading.layers import Attention, Config, rotate_half, rotated


class Interleaved(Attention):
    """Pairs (2i, 2i + 1); the model passes cos and sin for pairs (i, i + D/2)."""

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = (part.chunk(2, dim=-1)[0].repeat_interleave(2, dim=-1).unsqueeze(1) for part in (cos, sin))
        pairs = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
        return x * cos + pairs * sin

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return self.turned(q, cos, sin), self.turned(k, cos, sin)


class InterleavedPairsOnly(Interleaved):
    """Interleaved pairs with the angles of halves: features of one pair turn by different angles."""

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        pairs = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
        return x * cos.unsqueeze(1) + pairs * sin.unsqueeze(1)


class Partial(Attention):
    """Rotates as many features as cos has."""

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turning, staying = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        return torch.cat((rotated(turning, cos, sin), staying), dim=-1)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return self.turned(q, cos, sin), self.turned(k, cos, sin)


class PartialOfWhole(Partial):
    """Rotates half of the features by the first half of the angles for all."""

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return super().rotate(q, k, cos[..., :8], sin[..., :8])


class PartialLast(Partial):
    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        staying, turning = x[..., : -cos.shape[-1]], x[..., -cos.shape[-1] :]
        return torch.cat((staying, rotated(turning, cos, sin)), dim=-1)


class OtherDirection(Attention):
    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return super().rotate(q, k, cos, -sin)


class OtherHalfNegated(Attention):
    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return q * cos - rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class SinesFirst(Attention):
    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return super().rotate(q, k, sin, cos)


class PositionsIgnored(Attention):
    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return q, k


class PositionsIgnoredInOneLayer(Attention):
    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if self.layer_idx % 2:
            return q, k
        return super().rotate(q, k, cos, sin)


class ValuesRotated(Attention):
    def mixed(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Any]:
        return super().mixed(q, k, rotated(v, *given["position_embeddings"]), **given)


class QueriesRotated(Attention):
    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotated(q, cos, sin), k


class RotatedTwice(Attention):
    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return super().rotate(*super().rotate(q, k, cos, sin), cos, sin)


class AnglesScaled(Attention):
    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return super().rotate(q, k, cos * 1.01, sin * 1.01)


class AnglesOfNeighbours(Attention):
    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return super().rotate(q, k, cos.roll(1, 1), sin.roll(1, 1))


class HeadsRotatedInTurns(Attention):
    """Only the even heads of queries rotate."""

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        turned, k = super().rotate(q, k, cos, sin)
        even = torch.arange(q.shape[1], device=q.device) % 2 == 0
        return torch.where(even[:, None, None], turned, q), k


class OwnAngles(Attention):
    """Computes cos and sin from position_ids, as older code from the hub does."""

    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        width = config.head_dim
        inv_freq = 1.0 / (500.0 ** (torch.arange(0, width, 2, dtype=torch.float) / width))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Any]:
        angles = given["position_ids"][..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return super().mixed(q, k, v, **{**given, "position_embeddings": (angles.cos(), angles.sin())})


class OwnTable(Attention):
    """Adds learned positions to the keys."""

    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.positions = nn.Parameter(torch.zeros(config.max_position_embeddings, config.head_dim))

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Any]:
        k = k + self.positions[given["position_ids"]].unsqueeze(1)
        return super().mixed(q, k, v, **given)


HALF = {"rotary_width": 8}
CASES = (
    Case("interleaved", READ, attention=Interleaved),
    Case("partial", READ, attention=Partial, config=HALF, like=None),
    Case("partial, by half of the angles", LEFT, attention=PartialOfWhole),
    Case("the other direction", LEFT, attention=OtherDirection, words=("neg",)),
    Case("sines first", EITHER, attention=SinesFirst, words=("cos", "sin")),
    Case("positions ignored", READ, attention=PositionsIgnored),
    Case("values rotated", LEFT, attention=ValuesRotated, words=("rotat", "values")),
    Case("angles of its own", EITHER, attention=OwnAngles),
    Case("a table of its own", LEFT, attention=OwnTable, words=("positions",)),
)
VARIANTS = (
    Case("interleaved pairs by angles of halves", READ, attention=InterleavedPairsOnly),
    Case("partial, the last features", LEFT, attention=PartialLast, config=HALF, like=None),
    Case("the other direction for queries", LEFT, attention=OtherHalfNegated),
    Case("positions ignored in one layer", READ, attention=PositionsIgnoredInOneLayer),
    Case("queries rotated alone", LEFT, attention=QueriesRotated, words=("rotat", "keys")),
    Case("rotated twice", LEFT, attention=RotatedTwice, words=("rotat", "twice")),
    Case("cos and sin scaled", LEFT, attention=AnglesScaled),
    Case("angles of the token before", LEFT, attention=AnglesOfNeighbours, words=("roll",)),
    Case("heads rotated in turns", LEFT, attention=HeadsRotatedInTurns),
)
