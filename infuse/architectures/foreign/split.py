"""How ranks share a layer without a spec: which of its linears are cut, and where. Data only.

The layer keeps its own forward; its linears, tables and counts become one rank's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from infuse.architectures.part import Matrix
from infuse.parallel.slices import Range


@dataclass(frozen=True)
class TablePart:
    """A parameter or buffer with one axis over heads (relative position biases), and its shape on a rank."""

    path: str
    shape: tuple[int, ...]
    buffer: bool = False


@dataclass(frozen=True)
class Count:
    """A module attribute that counts heads or their width, and its value on a rank.

    "config.num_heads" is an attribute of the config that the module holds; it changes for that module alone.
    """

    module: str
    name: str
    value: int


@dataclass(frozen=True)
class SplitShape:
    """A rank's part of a layer that keeps its forward.

    `matrices` belong to linears, by path in the layer. `head_counts` are the heads of each rank (empty: the layer has
    none), `heads` is this rank's range of them. `attentions` are the paths of modules that may return attention
    weights. `interpretations` names the readings of the layer that lead to this split, for any number of ranks.
    """

    matrices: tuple[Matrix, ...]
    tables: tuple[TablePart, ...] = ()
    counts: tuple[Count, ...] = ()
    heads: Range = (0, 0)
    head_counts: tuple[int, ...] = ()
    attentions: tuple[str, ...] = ()
    interpretations: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @property
    def all_heads(self) -> int:
        return sum(self.head_counts)
