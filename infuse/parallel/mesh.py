"""Mesh: how many ranks share a layer, and which one this is. The size-1 mesh is the null object: everything is local."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    """`tp` ranks share each layer, `ep` ranks share the experts; passed explicitly, never looked up."""

    tp: int = 1
    tp_rank: int = 0
    ep: int = 1
    ep_rank: int = 0

    @property
    def size(self) -> int:
        return self.tp * self.ep


ONE = Mesh()
