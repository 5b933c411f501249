"""Norms: their declaration in a spec, their binding to a layer, and their shape."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from infuse.architectures.bind import Binder
from infuse.architectures.packing import STACK, Fill
from infuse.architectures.part import Parameter, PartShape

RMS, LAYER = "rms", "layer"
SCALE = "scale"  # x times a weight for each column, not normalised: the layer scale of vision towers


@dataclass(frozen=True)
class Norm:
    """A norm at `path`; a `*` in the path means one norm per head.

    `offset` is added to the weight (Gemma, LayerNorm1P). `optional`: layers may lack it.
    """

    path: str
    kind: str
    offset: float = 0.0
    optional: bool = False

    def bind(self, binder: Binder, name: str, optional: bool = False) -> NormShape | None:
        """Bind the norm; None if the layer has an Identity in its place or, if it is `optional`, no module."""
        path, star, _ = self.path.partition(".*")
        module = binder.module(path, optional or self.optional)
        if module is None or isinstance(module, nn.Identity):
            return None
        members = [f"{path}.{i}" for i in range(len(list(module.children())))] if star else [path]
        first = binder.module(members[0])
        eps = getattr(first, "variance_epsilon", getattr(first, "eps", None))
        if not isinstance(eps, float):
            binder.differ(f"{members[0]} has no eps")
            return None
        shapes: dict[str, tuple[int, ...]] = {}
        for kind in ("weight", "bias"):
            names = tuple(f"{member}.{kind}" for member in members)
            if names[0] not in binder.parameters:
                continue
            shapes[kind] = tuple(binder.claim(names[0]).shape)
            for other in names[1:]:
                binder.claim(other)
            binder.fills.append(Fill(f"{name}.{kind}", names, merge=STACK if star else "cat"))
            if star:
                shapes[kind] = (len(members), *shapes[kind])
        weight = shapes.get("weight")
        width = weight[-1] if weight else getattr(first, "normalized_shape", (0,))[-1]
        return NormShape(self.kind, width, eps, self.offset, weight, "bias" in shapes)


@dataclass(frozen=True)
class NormShape(PartShape):
    """Dimensions and settings of one norm. `weight` is the shape of its weight, or None.

    For a norm over all heads that ranks share, `whole` is the full width (0 if one rank has all heads), and
    `copies` ranks hold the same values.
    """

    kind: str
    width: int
    eps: float
    offset: float
    weight: tuple[int, ...] | None
    bias: bool
    whole: int = 0
    copies: int = 1

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        there = {"weight": self.weight is not None, "bias": self.bias}
        return tuple(Parameter(name) for name, is_there in there.items() if is_there)

    @property
    def ops(self) -> tuple[str, ...]:
        return {RMS: ("rms_norm",), LAYER: ("layer_norm",), SCALE: ()}[self.kind]
