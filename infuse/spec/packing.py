"""How query, key and value rows lie in one matrix, and how a target tensor is made from source tensors.

Everything is split to q, k, v first and merged again in one order, [q | k | v] by heads, so that grouped queries,
shards and quantization never see an interleaving. Rows are the first axis: weights [rows, in] and biases [rows] alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCKS = "blocks"  # [q: H D | k: K D | v: K D]           GPT-2, Phi-3, MPT
PER_HEAD = "per head"  # [head: (q D | k D | v D)] x H        BLOOM, GPT-NeoX
PER_GROUP = "per group"  # [group: (q D x H/K | k D | v D)] x K   Falcon 40B, InternLM2
FOUR_PARTS = "four parts"  # [part: (q | v | k)] x 4              CodeGen, as its TPU training sharded it
PACKINGS = (BLOCKS, PER_HEAD, PER_GROUP, FOUR_PARTS)

CAT, STACK = "cat", "stack"


@dataclass(frozen=True)
class Heads:
    """The head counts that a packing needs: H query heads and K key/value heads of width D."""

    query: int
    key: int
    width: int

    @property
    def rows(self) -> int:
        return (self.query + 2 * self.key) * self.width


@dataclass(frozen=True)
class Fill:
    """One target tensor of a step: which source tensors it is made from, and how.

    `target` is a name under the new module, `sources` are names under the replaced one. One source with a `packing` is
    split to q, k, v; several sources are merged by `merge` along a new or the first axis. `format` names a
    quantization format, None keeps the compute dtype.
    """

    target: str
    sources: tuple[str, ...]
    transposed: bool = False
    packing: str | None = None
    heads: Heads | None = None
    merge: str = CAT
    format: str | None = None


def split_qkv(packed: Tensor, packing: str, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Query rows [H D, ...], key rows [K D, ...] and value rows [K D, ...] of a packed matrix or bias."""
    assert packed.shape[0] == heads.rows, (packed.shape, heads)
    tail, (h, k, d) = packed.shape[1:], (heads.query, heads.key, heads.width)
    if packing == BLOCKS:
        q, key, value = packed.split((h * d, k * d, k * d))
        return q, key, value
    if packing == PER_HEAD:
        assert h == k, "per-head packing has a key head for each query head"
        parts = packed.view(h, 3, d, *tail)
        return tuple(parts[:, i].reshape(h * d, *tail) for i in range(3))  # type: ignore[return-value]
    if packing == PER_GROUP:
        parts = packed.view(k, h // k + 2, d, *tail)
        return (
            parts[:, :-2].reshape(h * d, *tail),
            parts[:, -2].reshape(k * d, *tail),
            parts[:, -1].reshape(k * d, *tail),
        )
    assert packing == FOUR_PARTS and h == k, packing
    parts = packed.view(4, 3, h * d // 4, *tail)
    q, value, key = (parts[:, i].reshape(h * d, *tail) for i in range(3))
    return q, key, value


def merge_qkv(q: Tensor, k: Tensor, v: Tensor, packing: str, heads: Heads) -> Tensor:
    """The inverse of `split_qkv`: rows in the order of `packing`."""
    tail, (h, n, d) = q.shape[1:], (heads.query, heads.key, heads.width)
    if packing == BLOCKS:
        return torch.cat((q, k, v))
    if packing == PER_HEAD:
        return torch.stack([t.view(h, d, *tail) for t in (q, k, v)], dim=1).reshape(heads.rows, *tail)
    if packing == PER_GROUP:
        groups = (q.view(n, h // n, d, *tail), k.view(n, 1, d, *tail), v.view(n, 1, d, *tail))
        return torch.cat(groups, dim=1).reshape(heads.rows, *tail)
    assert packing == FOUR_PARTS, packing
    return torch.stack([t.view(4, h * d // 4, *tail) for t in (q, v, k)], dim=1).reshape(heads.rows, *tail)
