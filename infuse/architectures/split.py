"""How a layer without a spec is shared by ranks: which of its linears are cut, and where. Data only.

The layer's own forward stays; its linears, tables and counts become those of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from infuse.architectures.part import Matrix
from infuse.parallel.slices import Range


@dataclass(frozen=True)
class TablePart:
    """A parameter or buffer with a place for each head along one axis (biases of relative positions), and a rank's
    shape of it.
    """

    path: str
    shape: tuple[int, ...]
    buffer: bool = False


@dataclass(frozen=True)
class Count:
    """An attribute of a module in the layer that counts heads or their width, and what it is on a rank.

    "config.num_heads": of the config that the module holds, for that module alone.
    """

    module: str
    name: str
    value: int


@dataclass(frozen=True)
class SplitShape:
    """A rank's part of a layer whose forward stays; `heads` are the rank's, of `all_heads` (0: the layer has none).

    `matrices` are of linears by their paths in the layer. `attentions` are the paths of the modules that may return the
    weights of their heads, `head_counts` the heads of each rank. `interpretations` name the ways to understand the layer
    that come to this: the same names whatever the number of ranks.
    """

    matrices: tuple[Matrix, ...]
    tables: tuple[TablePart, ...] = ()
    counts: tuple[Count, ...] = ()
    heads: Range = (0, 0)
    all_heads: int = 0
    attentions: tuple[str, ...] = ()
    head_counts: tuple[int, ...] = ()
    interpretations: tuple[str, ...] = field(default=(), compare=False, repr=False)
