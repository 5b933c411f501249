"""Readings of a model's repeated layers, of which those without a spec that fits become blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from infuse.architectures import specs_for
from infuse.architectures.foreign.plain import linears
from infuse.architectures.layer import Bound
from infuse.architectures.parts.experts import experts_in
from infuse.ground.authors import LIBRARIES, package_of, users_methods
from infuse.ground.errors import SpecMismatch, in_brief
from infuse.inputs.component import is_component
from infuse.layers.calls.contract import NEUTRAL, SERVED, unserved
from infuse.plan.found import config_around, model_around, models_around, one_by_one, traits
from infuse.reading.calls import NOT_REACHED, UNTOUCHED, LayerCall, reads_on_cache, recorded_calls
from infuse.reading.effects import attributes, changed, reads_index
from infuse.reading.explain import explained
from infuse.reading.keywords import unread_by
from infuse.reading.kind import Kind, read_once
from infuse.reading.outline import outline
from infuse.reading.read import index_of

_RECORDED = 2  # layers of a kind whose calls are recorded
_REMOTE = "transformers_modules"  # package of the classes that `trust_remote_code` loads


class Readings:
    """Reads the repeated layers of `model`: members of lists of modules, with two linears or more, when asked for.

    Parameters named in `exact` keep their dtype when the others get `dtype`.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, exact: Collection[str]):
        self._model, self._dtype, self._exact = model, dtype, exact
        self._changed: dict[str, list[str]] = {}  # what a run of the model changes in a layer
        self._ended: dict[str, str | None] = {}  # path of a layer → the error of the run that was to reach it
        self.layers = {} if is_component(model) else dict(_layers(model))

    def is_group(self, path: str) -> bool:
        """Whether the module at `path` is no repeated layer, but has some inside."""
        return path not in self.layers and any(other.startswith(f"{path}.") for other in self.layers)

    def of(self, path: str) -> Bound:
        """Read the layer at `path`. SpecMismatch if it is the user's own, or has something that no part has."""
        layer = self._model.get_submodule(path)
        if own := list(_users_own(type(layer))):
            raise SpecMismatch(type(layer).__name__, [f"has a method of your own, {', '.join(own)}"])
        if any(experts_in(layer)):
            raise SpecMismatch(type(layer).__name__, ["has experts, which no graph tells apart"])
        if isinstance(self._outline, str):
            raise SpecMismatch(type(layer).__name__, [f"cannot be copied to be read: {self._outline}"])
        calls = self.calls_of(path)
        if not calls and (ended := self._ended.get(self._called_alike[path])):
            raise SpecMismatch(type(layer).__name__, [f"{NOT_REACHED} ({ended})"])
        if by_model := self._changed.get(self._called_alike[path]):
            raise SpecMismatch(type(layer).__name__, [f"keeps state: its model changes {', '.join(by_model)}"])
        found = self._read(path, calls)
        given = {name for call in calls for name in unserved(call.arguments, SERVED | NEUTRAL)}
        unread = unread_by(layer)
        if others := sorted(name for name in given if name not in unread):
            if not self._is_read_alike(path, found, others):
                why = f"is called with {', '.join(others)}, which no block takes"
                raise SpecMismatch(type(layer).__name__, [why])
            found = replace(found, shape=found.shape.but_unread(others))
        mixer = next(iter(found.shape.mixers.values()))
        return replace(found, index=index_of(layer.get_submodule(mixer.replaces[0])))

    def _is_read_alike(self, path: str, found: Bound, names: Collection[str]) -> bool:
        """Whether the layer at `path` looks at none of these arguments, whether they are given or not."""
        try:
            values = (UNTOUCHED, None, True)
            return all(self._read(path, [call.but(names, v) for call in self.calls_of(path)]) == found for v in values)
        except SpecMismatch:
            return False

    def _read(self, path: str, calls: list[LayerCall]) -> Bound:
        assert isinstance(self._outline, nn.Module)
        config = config_around(self._model, path)
        place = path if reads_index(self._model.get_submodule(path)) else ""
        more = (_of_this_layer(config, path), place, *map(_call_traits, calls))
        found = read_once(Kind(self._outline.get_submodule(path), calls, config, more))
        if isinstance(found, SpecMismatch):
            raise found
        return found

    def calls_of(self, path: str) -> list[LayerCall]:
        """The recorded calls of the layer at `path` or of one that the model calls alike; none if no run reaches it."""
        return self._calls.get(self._called_alike[path], [])

    def explain(self, path: str) -> str:
        """The graph of the layer at `path` in units, one line each. SpecMismatch if the model cannot be outlined."""
        if isinstance(self._outline, str):
            raise SpecMismatch(type(self._model).__name__, [f"cannot be copied to be read: {self._outline}"])
        return explained(self._outline.get_submodule(path), self.calls_of(path))

    @cached_property
    def _outline(self) -> nn.Module | str:
        """The outline of the model; or why it has none."""
        try:
            return outline(self._model, self._dtype, self._exact)
        except Exception as error:  # an object of the user's that cannot be copied
            return in_brief(error)

    @cached_property
    def _called_alike(self) -> dict[str, str]:
        """Path of each layer → that of the layer whose calls are recorded for it.

        These are the first two of each kind, because a model may call its first layer in another way than the others.
        """
        kinds: dict[tuple, list[str]] = {}
        alike: dict[str, str] = {}
        for path in self.layers:
            around, config = model_around(self._model, path), config_around(self._model, path)
            kind = (around, traits(self._model, path, is_called=False), _of_this_layer(config, path))
            first = kinds.setdefault(kind, [])
            if len(first) < _RECORDED:
                first.append(path)
            alike[path] = path if path in first else first[-1]
        return alike

    @cached_property
    def _calls(self) -> dict[str, list[LayerCall]]:
        """The calls of layers in a run of the nearest model around them that reaches them.

        Where a nearer one takes a cache, only calls on a cache count.
        """
        assert isinstance(self._outline, nn.Module)
        calls: dict[str, list[LayerCall]] = {}
        waiting = dict.fromkeys(self._called_alike.values())
        before = {path: attributes(self._outline.get_submodule(path)) for path in waiting}
        for around, paths in one_by_one(self._model, waiting):
            layers = {path: self._outline.get_submodule(path) for path in paths}
            recorded, ended = recorded_calls(self._outline.get_submodule(around), layers, self._dtype)
            self._ended |= dict.fromkeys(paths, ended)
            for path, found in recorded.items():
                on_cache = any(call.past is not None for call in found)
                calls[path] = found if on_cache or not self._takes_cache_inside(around, path) else []
                waiting.pop(path)
        for path, own in before.items():
            self._changed[path] = changed(own, attributes(self._outline.get_submodule(path)))
        return calls

    def _takes_cache_inside(self, around: str, path: str) -> bool:
        """Whether a model inside the one at `around` takes a cache for the layer at `path`."""
        nearer = (other for other in models_around(self._model, path) if len(other) > len(around))
        return any(reads_on_cache(self._model.get_submodule(other)) for other in nearer)


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        for name, child in module.named_children():
            inside = any(specs_for(inner) for inner in child.modules() if inner is not child)
            if not inside and sum(1 for _ in linears(child)) > 1 and not _is_group(child):
                yield f"{path}.{name}" if path else name, child


def _is_group(module: nn.Module) -> bool:
    """Whether all linears of a module are in one list of layers of a class, as in stages and groups of layers."""
    names = [name for name, _ in linears(module)]
    for path, inner in module.named_modules():
        if isinstance(inner, nn.ModuleList) and len({type(layer) for layer in inner}) == 1:
            several = all(sum(1 for _ in linears(layer)) > 1 for layer in inner)
            if several and all(name.startswith(f"{path}.") for name in names):
                return True
    return False


def _users_own(cls: type) -> Iterator[str]:
    """Methods of a user's subclass of a library's layer; a class of its own, and remote code, are read as any."""
    if package_of(cls) in {*LIBRARIES, _REMOTE}:
        return
    if any(package_of(base) in LIBRARIES - {"torch"} for base in cls.__mro__):
        yield from users_methods(cls)


def _call_traits(call: LayerCall) -> tuple:
    arguments = [(name, _argument_traits(value)) for name, value in sorted(call.arguments.items())]
    return call.label, tuple(call.hidden.shape), call.past, tuple(arguments)


def _argument_traits(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, (tuple, list)):
        return tuple(map(_argument_traits, value))
    return value if isinstance(value, (bool, int, float, str)) else type(value).__name__


def _of_this_layer(config: Any, path: str) -> tuple:
    """This layer's entries in the lists of its config, such as `layer_types`."""
    numbers = [int(part) for part in path.split(".") if part.isdecimal()]
    lists = {name: value for name, value in vars(config).items() if isinstance(value, (list, tuple))} if config else {}
    if not numbers:
        return ()
    return tuple((name, repr(value[numbers[-1]])) for name, value in sorted(lists.items()) if numbers[-1] < len(value))


def binds_alike(bind: Callable[[], Bound], bound: Bound) -> bool:
    """Whether `bind` gives a layer the shape of `bound`."""
    try:
        return bind().shape == bound.shape
    except SpecMismatch:
        return False
