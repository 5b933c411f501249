"""ModuleSpec: a module that is replaced as a whole, wherever it is. ModuleShape: its dimensions and settings.

A layer has attention, an MLP and norms in a known order; a module is anything else with weights, such as a block of a
diffusion model. All settings are read from the instance, because modules of one model differ in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import nn

from infuse.architectures.bind import Binder
from infuse.architectures.packing import Fill
from infuse.architectures.part import ShapeOfParts
from infuse.ground.errors import SpecMismatch


class ModuleShape(ShapeOfParts):
    """Dimensions and settings of a whole module; `diffusion.parts` maps its type to the module that computes it.

    Ranks share its `parts`. A shape without parts states its `matrices`, `parameters` and `ops` itself.
    """

    @property
    def needs_no_kernels(self) -> bool:
        """Whether the new module is faster than the original without kernels of ours, because it computes less."""
        return False


class ModulePart(Protocol):
    """Interface of a spec's `part`: `bind` reads the module; `name` is where its tensors are in the new one."""

    def bind(self, binder: Binder, name: str) -> ModuleShape: ...


@dataclass(frozen=True)
class BoundModule:
    """The shape of one module and the fills from its parameters."""

    shape: ModuleShape
    fills: tuple[Fill, ...]


@dataclass(frozen=True)
class ModuleSpec:
    """A class of modules, as "module.name", and the part that replaces its instances."""

    layer: str
    part: ModulePart

    @property
    def library(self) -> str:
        return self.layer.partition(".")[0]

    def bind(self, module: nn.Module) -> BoundModule:
        """Read `module`, live or on meta. SpecMismatch lists everything in it that the part does not compute."""
        binder = Binder(module, None, None, transposed=False)
        shape = self.part.bind(binder, "")
        if differences := [*binder.differences, *binder.unclaimed()]:
            raise SpecMismatch(self.layer.rpartition(".")[2], differences)
        return BoundModule(shape, tuple(binder.fills))


def class_path(module: object) -> str:
    """The module's class as "module.name", which specs and parts recognize it by without importing it."""
    return f"{type(module).__module__}.{type(module).__qualname__}"
