"""Mesh: the ranks that hold a model together, and this rank's place among them. Numbers only."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Mesh:
    """`tp` ranks slice each layer and the width of every expert; `ep` ranks hold whole experts. Both can combine.

    tp * ep ranks hold the model. Neighbours have other experts of the same slice, or, if `tp_first`, other slices of
    the same experts. If `within`, tp ranks hold the model: `ep` of them have the experts, each sliced tp / ep times.
    Passed explicitly, never looked up.
    """

    tp: int = 1
    tp_rank: int = 0
    ep: int = 1
    ep_rank: int = 0
    within: bool = False
    tp_first: bool = False

    @property
    def size(self) -> int:
        return self.tp if self.within else self.tp * self.ep

    @property
    def rank(self) -> int:
        """This rank's number among all that hold the model."""
        if self.within:
            return self.tp_rank
        return self.ep_rank * self.tp + self.tp_rank if self.tp_first else self.tp_rank * self.ep + self.ep_rank

    @property
    def slices(self) -> int:
        """Number of ranks that slice the width of each expert."""
        return self.tp // self.ep if self.within else self.tp

    @property
    def slice_rank(self) -> int:
        """Index of this rank's slice of its experts."""
        return self.tp_rank // self.ep if self.within else self.tp_rank

    @property
    def is_copy(self) -> bool:
        """True if an earlier rank has the same slices of all layers without experts."""
        return not self.within and self.ep_rank > 0

    def at(self, rank: int) -> Mesh:
        """The mesh of another rank that holds this model."""
        if self.within:
            return replace(self, tp_rank=rank, ep_rank=rank % self.ep)
        high, low = divmod(rank, self.tp if self.tp_first else self.ep)
        tp_rank, ep_rank = (low, high) if self.tp_first else (high, low)
        return replace(self, tp_rank=tp_rank, ep_rank=ep_rank)

    def ranks(self) -> tuple[Mesh, ...]:
        """The mesh of each rank that holds this model, in their order."""
        return tuple(self.at(rank) for rank in range(self.size))

    def __str__(self) -> str:
        if self.ep == 1:
            return f"rank {self.rank} of {self.size}"
        slices = f", each in {self.slices} slices" if self.slices > 1 else ""
        return f"rank {self.rank} of {self.size}; experts on {self.ep}{slices}"


ONE = Mesh()
