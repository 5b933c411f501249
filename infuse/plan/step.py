"""Step: one replacement that a plan decides on; Left: a module that stays as it is. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from infuse.architectures.packing import Fill
from infuse.architectures.ranks import Shape
from infuse.plan.formats import held_bytes, matrices_made

BLOCK, SPLIT, LINEAR, EMBEDDING, ATTENTION = "block", "split", "linear", "embedding", "attention"


@dataclass(frozen=True)
class Step:
    """One replacement. `path` names the module, `depth` is "block", "split", "linear", "embedding" or "attention" (no
    shape).

    `bodies`: op → body. `attn` is the path of the attention module inside a layer, `index` the layer's place in the
    cache; `shares` is the path of the head whose weight an embedding looks its rows up in. Where ranks share the
    module, `shape` and `fills` are this rank's, and `whole` is the shape of all of it; `others` are further
    interpretations of a layer that is split, for the proof to choose from. `skips_padding`: an encoder's layer returns
    zeros at the padding instead of computing it.
    """

    path: str
    depth: str
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
    def kind(self) -> tuple:
        """Steps of one kind differ in their weights and place only: one proof speaks for all."""
        return (self.depth, self.layer, self.shape, self.fills, self.bodies, tuple(other.kind for other in self.others))

    @property
    def formats(self) -> dict[str, str]:
        """Target weight → quantization format."""
        return {fill.target: fill.format for fill in self.fills if fill.format}

    @property
    def matrices(self) -> tuple[tuple[str, str | None, int], ...]:
        """Each matrix: its target, its format, and where it has one the bytes that are held, scales and zeros included."""
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
