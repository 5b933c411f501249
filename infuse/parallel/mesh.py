"""Mesh: how many ranks share a layer, and which one this is."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Mesh:
    """`tp` ranks share each layer, `ep` ranks share the experts. Passed explicitly, never looked up."""

    tp: int = 1
    tp_rank: int = 0
    ep: int = 1
    ep_rank: int = 0

    @property
    def size(self) -> int:
        return self.tp * self.ep

    def ranks(self) -> tuple[Mesh, ...]:
        """The mesh of each rank that shares a layer with this one."""
        return tuple(replace(self, tp_rank=rank) for rank in range(self.tp))

    def __str__(self) -> str:
        return f"rank {self.tp_rank} of {self.tp}"


ONE = Mesh()
