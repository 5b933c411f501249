"""Step: one replacement of a plan. Left: a module that stays as it is. Data only."""

from __future__ import annotations

from dataclasses import dataclass, replace

from infuse.architectures.foreign.split import SplitShape
from infuse.architectures.layer import LayerShape
from infuse.architectures.packing import Fill, Part, rejoined
from infuse.architectures.part import Matrix
from infuse.architectures.ranks import Shape
from infuse.plan.formats import matrices_made, quantized_bytes
from infuse.plan.kinds import KINDS, Kind, shape_class
from infuse.quant.parse import quant_format


@dataclass(frozen=True)
class Step:
    """Replace the module at `path` by one built from `shape`. Only the step for attention has no shape.

    `bodies`: pairs of op and body. `index`: the layer's index in the cache. `shares`: path of the head whose weight an
    embedding uses. If ranks share the module, `shape` and `fills` are this rank's, and `whole` is the shape of the
    whole module. `others`: further interpretations of a layer without a spec; the proof picks one. `skips_padding`: an
    encoder layer returns zeros at padding instead of computing it.
    """

    path: str
    layer: str
    shape: Shape | None
    fills: tuple[Fill, ...]
    bodies: tuple[tuple[str, str], ...]
    why: str
    index: int | None = None
    shares: str = ""
    whole: Shape | None = None
    others: tuple[Step, ...] = ()
    skips_padding: bool = False

    @property
    def kind(self) -> Kind:
        return KINDS[shape_class(self.shape)]

    @property
    def depth(self) -> str:
        return self.kind.depth

    @property
    def is_layer(self) -> bool:
        return self.kind.is_layer

    @property
    def keeps_forward(self) -> bool:
        return self.kind.keeps_forward

    @property
    def is_called(self) -> bool:
        return self.kind.is_called

    @property
    def decodes(self) -> bool:
        """True if the step's module uses a KV cache."""
        return isinstance(self.shape, LayerShape) and self.index is not None and self.shape.decodes

    @property
    def interpretations(self) -> tuple[str, ...]:
        """Names of the interpretation of a layer that keeps its forward; empty for others."""
        return self.whole.interpretations if isinstance(self.whole, SplitShape) else ()

    @property
    def plain(self) -> Step:
        """The step with reference bodies and without quantization, in which no matrix is kept apart from others."""
        fills = (replace(fill, format=None, as_stored=False, ordered=False) for fill in rejoined(self.fills))
        return replace(self, bodies=(), fills=tuple(fills))

    @property
    def likeness(self) -> tuple:
        """Equal for steps that differ only in weights and path, so that one proof covers all of them."""
        others = tuple(other.likeness for other in self.others)
        return (self.depth, self.layer, self.shape, self.fills, self.bodies, others)

    @property
    def exact(self) -> frozenset[str]:
        """Names of the parameters under the old module that stay in float32."""
        return frozenset(source for fill in self.fills if fill.exact for source in fill.sources)

    @property
    def formats(self) -> dict[str, str]:
        """Target weight → quantization format."""
        return {fill.target: fill.format for fill in self.fills if fill.format}

    @property
    def ordered(self) -> frozenset[str]:
        """Target weights whose inputs are in the order in which the checkpoint stores them (act-order)."""
        return frozenset(fill.target for fill in self.fills if fill.ordered)

    @property
    def rounded(self) -> dict[str, str]:
        """Target weight → format, of those that round: codes that are not those of the sources, or activations."""
        return {
            fill.target: fill.format
            for fill in self.fills
            if fill.format and not (fill.as_stored and quant_format(fill.format).activation_bits == 16)
        }

    @property
    def apart(self) -> dict[str, tuple[Part, ...]]:
        """Merged matrix, by its path, → its parts, if their formats differ."""
        parts: dict[str, dict[int, Part]] = {}
        for part in (fill.part for fill in self.fills if fill.part is not None):
            parts.setdefault(part.matrix, {})[part.number] = part
        return {matrix: tuple(of_matrix.values()) for matrix, of_matrix in parts.items()}

    @property
    def made(self) -> list[tuple[Fill, Matrix]]:
        """The fills that build a matrix, each with its matrix."""
        return matrices_made(self.fills, self.shape)

    @property
    def matrices(self) -> tuple[tuple[str, str | None, int], ...]:
        """Target, format and bytes of each matrix. Bytes include scales and zeros, and are 0 without a format."""
        sizes = quantized_bytes(self.fills, self.shape, self.bodies)
        return tuple((fill.target, fill.format, sizes.get(fill.target, 0)) for fill, _ in self.made)


OUTSIDE = "a table or a norm outside of replaced layers"  # what nobody expects to be replaced


@dataclass(frozen=True)
class Left:
    """A module that stays as it is, and why."""

    path: str
    why: str
