"""Step: one replacement that a plan decides on; Left: a module that stays as it is. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from infuse.architectures.layer import LayerShape
from infuse.architectures.packing import Fill
from infuse.architectures.plain import EmbeddingShape, LinearShape
from infuse.architectures.ranks import Shape
from infuse.architectures.split import SplitShape
from infuse.plan.formats import held_bytes, matrices_made

BLOCK, SPLIT, LINEAR, EMBEDDING, ATTENTION = "block", "split", "linear", "embedding", "attention"
_DEPTHS: Mapping[type, str] = MappingProxyType(
    {LayerShape: BLOCK, SplitShape: SPLIT, LinearShape: LINEAR, EmbeddingShape: EMBEDDING, type(None): ATTENTION}
)


@dataclass(frozen=True)
class Step:
    """Replace the module at `path` by one with the numbers of `shape`; only the step for attention has no shape.

    `bodies`: op → body. `attn` is the path of the attention module inside a layer, `index` the layer's place in the
    cache. `shares` is the path of the head whose weight an embedding looks its rows up in. If ranks share the module,
    `shape` and `fills` are this rank's and `whole` is the shape of all of it; `others` are further interpretations of a
    layer without a spec, and the proof picks one. `skips_padding`: an encoder's layer returns zeros at the padding
    instead of computing it.
    """

    path: str
    layer: str
    shape: Shape | None
    fills: tuple[Fill, ...]
    bodies: tuple[tuple[str, str], ...]
    why: str
    index: int | None = None
    attn: str = ""
    shares: str = ""
    whole: Shape | None = None
    others: tuple[Step, ...] = ()
    skips_padding: bool = False

    @property
    def depth(self) -> str:
        """How much of the module is replaced, in the plan's words."""
        return _DEPTHS[type(self.shape)]

    @property
    def kind(self) -> tuple:
        """Equal for steps that differ only in their weights and place, so that one proof covers all of them."""
        return (self.depth, self.layer, self.shape, self.fills, self.bodies, tuple(other.kind for other in self.others))

    @property
    def formats(self) -> dict[str, str]:
        """Target weight → quantization format."""
        return {fill.target: fill.format for fill in self.fills if fill.format}

    @property
    def matrices(self) -> tuple[tuple[str, str | None, int], ...]:
        """Target, format and bytes of each matrix; the bytes include scales and zeros, and are 0 without a format."""
        if self.shape is None:
            return ()
        sizes = held_bytes(self.fills, self.shape, self.bodies)
        made = matrices_made(self.fills, self.shape)
        return tuple((fill.target, fill.format, sizes.get(fill.target, 0)) for fill, _ in made)


@dataclass(frozen=True)
class Left:
    """A module that stays as it is, and why."""

    path: str
    why: str
