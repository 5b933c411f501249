"""Kinds of layers: each is read once on a machine, however many layers, models and processes have it."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from infuse.architectures.layer import Bound
from infuse.ground.authors import package_of
from infuse.ground.cache_folder import READINGS, are_used
from infuse.ground.errors import SpecMismatch, in_brief
from infuse.ground.identity import Code, digest, of_infuse, of_machine
from infuse.ground.logs import log
from infuse.reading.calls import LayerCall, attention_function
from infuse.reading.effects import code_of, containers
from infuse.reading.read import read

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype)
_HOLD = (tuple, list, set, frozenset, dict)


class Kind:
    """Everything that a reading depends on: equal for layers that are read alike.

    `more`: what the caller knows to differ. A layer with an attribute that cannot be compared is a kind of its own.
    """

    def __init__(self, layer: nn.Module, calls: Sequence[LayerCall], config: Any, more: Any):
        self._read: tuple[nn.Module, Sequence[LayerCall]] | None = (layer, calls)
        self._name = type(layer).__name__
        configs = {id(one): one for one in (config, *(vars(module).get("config") for module in layer.modules()))}
        texts = {key: _text(one) for key, one in configs.items()}
        modules = tuple(
            (path, type(module), _attributes(module), texts[id(vars(module).get("config"))])
            for path, module in layer.named_modules()
        )
        classes = tuple(_of_class(cls) for cls in dict.fromkeys(type(module) for module in layer.modules()))
        tensors = (*layer.named_parameters(), *layer.named_buffers())
        sizes = tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors)
        code = code_of(layer), _comparable(containers(layer))
        self._key = (modules, classes, sizes, code, texts[id(config)], attention_function(config), more)
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kind) and self._key == other._key

    def read(self) -> Bound | SpecMismatch:
        """Read the layer, or take what an earlier process read, and let go of it."""
        assert self._read is not None
        layer, calls = self._read
        self._read = None
        identity = self._identity()
        found = None if identity is None else _kept(identity)
        if found is not None:
            return found
        try:
            found = read(layer, calls)
        except SpecMismatch as mismatch:
            found = mismatch
        except Exception as error:  # no layer that we cannot read keeps a model from running
            log.warning("reading %s failed", type(layer).__name__, exc_info=True)
            return SpecMismatch(type(layer).__name__, [f"cannot be read: {in_brief(error)}"])
        if identity is not None:
            with suppress(pickle.PicklingError, AttributeError, TypeError):
                READINGS.write(identity, pickle.dumps(found))
        return found

    def _identity(self) -> str | None:
        """That of the reading in all processes; None if something in its key has none, or none are kept."""
        if not are_used():
            return None
        try:
            return digest("reading", of_infuse(), of_machine(torch.device("cpu")), Code()(self._key))
        except Exception as error:  # attributes of the user's may raise anything
            log.debug("%s is read in each process: %s", self._name, in_brief(error))
            return None


def _kept(identity: str) -> Bound | SpecMismatch | None:
    """What an earlier process read. The file is trusted as the kernels beside it are."""
    kept = READINGS.read(identity)
    if kept is None:
        return None
    try:
        return pickle.loads(kept)
    except Exception as error:  # it is read anew
        log.debug("a reading that was kept cannot be used: %s", in_brief(error))
        return None


@lru_cache(maxsize=512)
def read_once(kind: Kind) -> Bound | SpecMismatch:
    return kind.read()


def _attributes(module: nn.Module) -> tuple:
    named = ((name, value) for name, value in sorted(vars(module).items()) if name not in _OF_MODULES)
    return tuple((name, _comparable(value)) for name, value in named)


_OF_MODULES = frozenset(vars(nn.Module())) | {"config", "layer_idx", "layer_id", "layer_number"}


def _of_class(cls: type) -> tuple:
    """Numbers and words, and what holds them, among the attributes of a class."""
    own = [kind for kind in cls.__mro__ if package_of(kind) not in ("torch", "builtins")]
    named = ((name, value) for kind in own for name, value in vars(kind).items() if not name.startswith("__"))
    return tuple((name, _comparable(value)) for name, value in named if isinstance(value, (*_PLAIN, *_HOLD)))


def _comparable(value: Any) -> Any:
    """A value that is equal for equal attributes; the object itself where that is not known, or a new one."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_comparable, value))
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(map(_comparable, value))
    if isinstance(value, dict):
        return type(value), tuple((_comparable(name), _comparable(inner)) for name, inner in value.items())
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, partial):  # a new one in each model, as in transformers' activations
        return partial, _comparable(value.func), _comparable(value.args), _comparable(value.keywords)
    return value if _is_hashable(value) else object()


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _text(config: Any) -> str:
    values = config.to_dict() if hasattr(config, "to_dict") else getattr(config, "__dict__", config)
    return f"{type(config)} {values!r}"
