"""WayBack: how a module that was replaced is put back, and what has been changed on ours in its place since."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakValueDictionary

from torch import Tensor, nn

from infuse.architectures.packing import Fill
from infuse.weights.fill import moves, source_view
from infuse.weights.lazy import place_of
from infuse.weights.skeleton import Skeleton, is_aligned

_OF_THESE_TENSORS = ("_inside", "_filled")  # attributes that copies do without


class Replaced(Protocol):
    """A replaced module, as `weights/state` knows it."""

    fills: tuple[Fill, ...]
    stored: Mapping[str, tuple[str, ...]]
    shapes: Mapping[str, tuple[int, ...]]

    def on_its_own(self, name: str, tensor: Tensor) -> Tensor: ...


@dataclass
class WayBack:
    """`skeleton`: what is left of the replaced module. `attributes`: what was set on each part of ours, by its path,
    when it was complete.
    """

    skeleton: Skeleton
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    _requires_gradients: bool = False
    _forwards: dict[str, Any] = field(default_factory=dict)
    _inside: WeakValueDictionary[str, nn.Module] | None = None
    _filled: dict[str, Any] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _OF_THESE_TENSORS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _inside=None, _filled={})

    def share_memory(self, original: Replaced, module: nn.Module) -> None:
        """Let Parameters that were merged use the memory of ours: whoever holds one then holds no second copy."""
        holds = Counter(name for fill in original.fills for name in fill.sources)
        for fill in original.fills:
            place, leaf = place_of(module, fill.target)
            target = place._parameters.get(leaf)
            if target is None or target.is_meta or fill.cut is not None:
                continue
            for number, name in enumerate(fill.sources):
                was = self.skeleton.parameters.get(name)
                parameter = None if was is None or holds[name] > 1 else was.alive
                view = None if parameter is None else source_view(fill, number, target.detach(), original.shapes)
                if parameter is not None and view is not None and _can_share(parameter, view):
                    parameter.data = original.on_its_own(name, view)

    @property
    def is_noted(self) -> bool:
        return bool(self._filled)

    def note(self, original: Replaced, module: nn.Module) -> None:
        """Remember the complete `module` as it is now, to tell later what has been changed."""
        parts = dict(module.named_modules())
        self._requires_gradients = _require_gradients(module)
        self._filled = {fill.target: _versions(original, fill, module) for fill in original.fills}
        self._forwards = {path: vars(part).get("forward") for path, part in parts.items()}
        self._inside = WeakValueDictionary(parts)

    def is_exchanged(self, path: str, part: nn.Module) -> bool:
        """Whether `part`, at `path` inside of our module, is another one by now, or has another forward."""
        other = self._inside is not None and self._inside.get(path) is not part
        return other or vars(part).get("forward") is not self._forwards.get(path)

    def is_trained(self, module: nn.Module) -> bool | None:
        """Whether the parameters of `module` require gradients, if that has been set since; None if not."""
        now = _require_gradients(module)
        return None if now == self._requires_gradients else now

    def written(self, original: Replaced, module: nn.Module) -> set[str]:
        """The original's tensors whose values in `module` have been written to."""
        now = {fill.target: _versions(original, fill, module) for fill in original.fills}
        changed = (fill for fill in original.fills if self._filled.get(fill.target) != now[fill.target])
        return {name for fill in changed for name in fill.sources}

    def handed_on(self, original: Replaced, module: nn.Module) -> dict[str, nn.Parameter]:
        """The original's Parameters that `module` has as they are, by their names in the original."""
        found: dict[str, nn.Parameter] = {}
        for fill in filter(moves, original.fills):
            place, leaf = place_of(module, fill.target)
            name, parameter = fill.sources[0], place._parameters.get(leaf)
            was = self.skeleton.parameters.get(name)
            if parameter is None or was is None or parameter.shape != original.shapes[name]:
                continue
            if parameter.dtype == was.dtype:
                found[name] = parameter
        return found


def _require_gradients(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _versions(original: Replaced, fill: Fill, module: nn.Module) -> list[tuple[int, int]]:
    places = [place_of(module, name) for name in original.stored[fill.target]]
    tensors = [place._parameters.get(leaf, place._buffers.get(leaf)) for place, leaf in places]
    return [(id(tensor), tensor._version) for tensor in tensors if tensor is not None]


def _can_share(parameter: nn.Parameter, view: Tensor) -> bool:
    alike = parameter.dtype == view.dtype and parameter.device == view.device
    return alike and is_aligned(view) and not parameter.is_shared() and type(parameter.data) is Tensor
