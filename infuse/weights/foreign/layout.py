"""Input and output of the recognisers of foreign layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field

from torch import nn

from infuse.weights.checkpoint import Checkpoint
from infuse.weights.lazy import LazyTensor, Shape
from infuse.weights.names import Naming


@dataclass(frozen=True)
class Unread:
    """Tensors of a `checkpoint` that no earlier recogniser has used, and `shapes` of the model tensors to fill.

    `names`: checkpoint tensors whose name the model lacks. `by_name`: model name → checkpoint name of the tensors that
    match by name; these are read unchanged unless a recogniser uses them.
    """

    checkpoint: Checkpoint
    model: nn.Module
    naming: Naming
    names: tuple[str, ...]
    by_name: Mapping[str, str]
    shapes: Mapping[str, Shape]

    @property
    def missing(self) -> dict[str, Shape]:
        """Shapes of the model's tensors without a match by name."""
        return {name: shape for name, shape in self.shapes.items() if name not in self.by_name}

    def whole(self, name: str) -> LazyTensor:
        """Return a checkpoint tensor as stored; the first rank's piece if ranks saved pieces."""
        return self.checkpoint.pieces[name].first

    def stored(self, name: str) -> str:
        """Format the dtype and shape of a checkpoint tensor for an error message."""
        pieces = self.checkpoint.pieces[name]
        return f"{pieces.dtype} {pieces.shapes[0]}"


@dataclass(frozen=True)
class Recognised:
    """Result of a recogniser: lazy tensors by model name, and the checkpoint names `used` to build them.

    `faults`: model name → why the used tensors cannot form it.
    """

    tensors: Mapping[str, LazyTensor] = field(default_factory=dict)
    used: Set[str] = frozenset()
    faults: Mapping[str, str] = field(default_factory=dict)


Recogniser = Callable[[Unread], Recognised]
