"""Find user customizations in a layer that a block would not call or would lose. Such layers stay.

These are methods of a subclass or patch, forwards set on instances, inner hooks, tensors and modules that the class
does not create, and parts that are also used outside of the layer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn

from infuse.architectures import specs_for
from infuse.architectures.foreign.plain import patched
from infuse.architectures.layer import LayerShape
from infuse.diffusion.modules import module_spec
from infuse.ground.authors import LIBRARIES, is_librarys, users_methods, words_of
from infuse.layers.calls.recorders import has_recorders_alone

_CONTAINERS = "torch.nn.modules.container"  # their children have arbitrary names


class UsersOwn:
    """Finds user customizations in the layers of `model`, in which no step has changed anything yet.

    `read`: layers without a spec that may be replaced as blocks.
    """

    def __init__(self, model: nn.Module, read: Iterable[nn.Module] = ()):
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._holders: dict[int, list[tuple[nn.Module, str]]] = {}
        for holder in model.modules():
            for name, child in holder._modules.items():
                self._holders.setdefault(id(child), []).append((holder, name))
        layers = [*read, *(module for module in model.modules() if specs_for(module) or module_spec(module))]
        self._in_layers = {id(module) for layer in layers for module in layer.modules()}

    def moved(self, layer: nn.Module, shape: LayerShape) -> list[str]:
        """The paths of modules whose hooks move to parts: around the one that a part is called as, recorders alone."""
        moved = [*shape.recorded.values()]
        for mixer in (mixer for mixer in shape.mixers.values() if mixer.replaces):
            called, outermost = mixer.replaces[0], mixer.replaces[-1]
            if called == outermost or has_recorders_alone(layer.get_submodule(outermost)):
                moved.append(outermost)
        return moved

    def inside(self, layer: nn.Module, moved: Collection[str], library: str) -> list[str]:
        """List customizations that a whole block would not call or would lose. `layer` has a class of `library`.

        Hooks on the layer itself and on the modules at the paths `moved` are not listed: they move to the block.
        """
        reasons = self.methods(layer, library)
        libraries = {*LIBRARIES, library}
        for path, module in layer.named_modules():
            where = path or "the layer"
            if patched(module):
                reasons.append(f"{where} has a forward set on the instance")
            elif path and path not in moved and (module._forward_hooks or module._forward_pre_hooks):
                reasons.append(f"{path} has a hook, which a whole block would not call")
            if names := sorted(_added(module)):
                reasons.append(f"{where} has {', '.join(names)}, which {type(module).__name__} does not make")
            if names := [name for name, value in vars(module).items() if _is_users_function(value, libraries)]:
                reasons.append(f"{where} has a function of your own, {', '.join(names)}, which a block would not call")
        return reasons + self.shared(layer)

    def methods(self, layer: nn.Module, library: str) -> list[str]:
        """List methods of the user that override or patch those of a library, in any module of the layer."""
        libraries = {*LIBRARIES, library}
        by_class: Mapping[type, list[str]] = {
            kind: list(users_methods(kind, libraries)) for kind in {type(module) for module in layer.modules()}
        }
        return [
            f"{path or 'the layer'} has a method of your own, {', '.join(names)}, which a whole block would not call"
            for path, module in layer.named_modules()
            if (names := by_class[type(module)])
        ]

    def shared(self, layer: nn.Module) -> list[str]:
        """List parts of `layer` with parameters that are also used outside of all layers: they would not stay shared.

        Parts shared between layers are allowed, because the new layers share the result.
        """
        reasons = []
        for path, module in layer.named_modules():
            holders = self._holders.get(id(module), ())
            outside = [(holder, name) for holder, name in holders if id(holder) not in self._in_layers]
            if path and outside and next(module.parameters(), None) is not None:
                holder, name = outside[0]
                other = ".".join(part for part in (self._paths[id(holder)], name) if part)
                reasons.append(f"{path} is also {other}, which stays the same module")
        return reasons


def _is_users_function(value: Any, libraries: Collection[str]) -> bool:
    if not callable(value) or isinstance(value, (type, nn.Module)):
        return False
    # also an object of a library's class with a patched method, such as a processor of diffusers
    return not is_librarys(value, libraries) or any(users_methods(type(value), libraries))


def _added(module: nn.Module) -> set[str]:
    """Names of buffers and modules that no method of the class mentions."""
    kind: Any = type(module)
    if kind.__module__ == _CONTAINERS:
        return set()
    entries = (*module._buffers.items(), *module._modules.items())
    added = {name for name, value in entries if value is not None} - _named(kind)
    if any(base.__module__ == _CONTAINERS for base in kind.__mro__):  # it numbers its modules, after a word or without
        stems = {name: name.rstrip("0123456789") for name in added}
        added = {name for name, stem in stems.items() if stem == name or (stem and stem not in _named(kind))}
    return added


@cache
def _named(cls: type) -> frozenset[str]:
    """Every attribute and word in the code of the class's methods, and of its bases' up to nn.Module."""
    kinds = [kind for kind in cls.__mro__ if kind not in (nn.Module, object)]
    methods = [value for kind in kinds for value in vars(kind).values() if isinstance(value, FunctionType)]
    return frozenset(word for method in methods for word in words_of(method))
