"""What a recogniser of a foreign layout is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field

from torch import nn

from infuse.weights.checkpoint import Checkpoint
from infuse.weights.lazy import FileTensor, LazyTensor, Shape
from infuse.weights.names import Naming


@dataclass(frozen=True)
class Unread:
    """The tensors of a `checkpoint` that no recogniser before has used, and the model's `shapes` that it may fill.

    `names`: tensors that the model has no name for. `by_name`: the model's name → the checkpoint's, of tensors that the
    model's names find; these are read as they are unless a recogniser uses them.
    """

    checkpoint: Checkpoint
    model: nn.Module
    naming: Naming
    names: tuple[str, ...]
    by_name: Mapping[str, str]
    shapes: Mapping[str, Shape]

    @property
    def missing(self) -> dict[str, Shape]:
        """Shapes of the model's tensors that names alone do not find."""
        return {name: shape for name, shape in self.shapes.items() if name not in self.by_name}

    def whole(self, name: str) -> LazyTensor:
        """A tensor of the checkpoint as it is stored; of one that ranks saved in pieces, the first rank's."""
        return FileTensor(self.checkpoint.pieces[name].files[0], name)

    def stored(self, name: str) -> str:
        """Dtype and shape of a tensor of the checkpoint, for an error."""
        pieces = self.checkpoint.pieces[name]
        return f"{pieces.dtype} {pieces.shapes[0]}"


@dataclass(frozen=True)
class Recognised:
    """What a recogniser makes: lazy tensors by the model's names, from the checkpoint's names that are `used`.

    `faults`: the model's name → why the tensors that are used do not make it.
    """

    tensors: Mapping[str, LazyTensor] = field(default_factory=dict)
    used: Set[str] = frozenset()
    faults: Mapping[str, str] = field(default_factory=dict)


Recogniser = Callable[[Unread], Recognised]
