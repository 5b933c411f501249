"""ModuleSpec: a module that is replaced as a whole, whatever is around it. ModuleShape: what the new one is built from.

A layer has attention, an MLP and norms in a known order; a module is anything else with weights, such as a block of a
diffusion model. All settings are read from the instance, because modules of one model differ in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from torch import nn

from infuse.architectures.bind import Binder
from infuse.architectures.packing import Fill
from infuse.architectures.part import Matrix, Parameter, PartShape, inside
from infuse.errors import SpecMismatch

if TYPE_CHECKING:
    from typing_extensions import Self


class ModuleShape(PartShape):
    """Dimensions and settings of a whole module; `layers.parts` maps its type to the module that computes it.

    `parts` are those of its fields that are parts, which ranks share; `child` is the name of a part's module, "" if its
    matrices are the module's own. A shape without parts states its `matrices`, `parameters` and `ops` itself.
    """

    @property
    def needs_no_kernels(self) -> bool:
        """Whether the new module is faster than the original without kernels of ours, because it computes less."""
        return False

    @property
    def parts(self) -> Mapping[str, PartShape]:
        return {}

    def child(self, field: str) -> str:
        return field

    def with_parts(self, parts: Mapping[str, PartShape]) -> Self:
        return replace(self, **parts)  # type: ignore[type-var]

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return tuple(inside(self.child(field), one) for field, part in self.parts.items() for one in part.matrices)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(inside(self.child(field), one) for field, part in self.parts.items() for one in part.parameters)

    @property
    def ops(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(op for part in self.parts.values() for op in part.ops))


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
