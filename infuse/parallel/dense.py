"""Group of the ranks that slice layers without experts, where several ranks hold copies of each slice."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from infuse.parallel.group import LOCAL, Group
from infuse.parallel.mesh import Mesh


class DenseGroup(Group):
    """`mesh.tp` ranks that sum and gather through the group of all ranks; copies of a slice contribute nothing.

    With a single group, all ranks run the same collectives, and a rank has one number in all errors.
    """

    def __init__(self, ranks: Group, mesh: Mesh):
        super().__init__(None)
        self.rank, self.size = mesh.tp_rank, mesh.tp
        self._ranks, self._mesh = ranks, mesh

    def all_reduce(self, x: Tensor, what: str) -> Tensor:
        return self._ranks.all_reduce(x.zero_() if self._mesh.is_copy else x, what)

    def all_gather(self, x: Tensor, sizes: Sequence[int], axis: int, what: str) -> Tensor:
        mine = x.narrow(axis, 0, 0) if self._mesh.is_copy else x
        all_sizes = [0 if rank.is_copy else sizes[rank.tp_rank] for rank in self._mesh.ranks()]
        return self._ranks.all_gather(mine, all_sizes, axis, what)


def with_dense(group: Group, mesh: Mesh) -> Group:
    """Return `group` after setting its `dense` group: the ranks of `mesh` that slice layers without experts."""
    if mesh.tp == 1:
        group.make_dense = lambda ranks: LOCAL
    elif group.size != mesh.tp:
        group.make_dense = partial(DenseGroup, mesh=mesh)
    return group
