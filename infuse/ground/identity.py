"""Texts and digests of values, of the code of functions and classes, of infuse itself and of the machine.

Equal in all processes where the same would run. A value that no text tells apart from others is Unknown.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from infuse import native
from infuse.ground.checksum import crc32
from infuse.ground.device import Device
from infuse.ground.modes import is_plain

_NUMBERS = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
_PLAIN = (*_NUMBERS, Enum, torch.dtype, torch.device, torch.Size)
_OF_CLASSES = frozenset({"__doc__", "__module__", "__dict__", "__weakref__", "__annotations__", "_abc_impl"})
_NOT_ASKED = frozenset({"INFUSE_CACHE_DIR", "INFUSE_RECEIPTS", "INFUSE_LAUNCHED"})  # of our variables
_ROOT = Path(__file__).parents[1]
_IMPORTED = time.time()


class Unknown(Exception):
    """A value that may differ where its text does not."""


class Code:
    """Texts of values and of the code of functions and classes.

    Functions of torch, and those of transformers outside its models, are named: their versions are part of an identity.
    """

    def __init__(self) -> None:
        self._known: dict[Any, str] = {}
        self._configs: dict[int, tuple[Any, str]] = {}  # by id of the config, which is kept alive here

    def __call__(self, value: Any) -> Any:
        """Nested tuples of plain values, equal for equal values in all processes. Raises Unknown."""
        if isinstance(value, _PLAIN):
            return type(value).__name__, repr(value)
        if isinstance(value, (tuple, list)):
            return type(value).__name__, [self(inner) for inner in value]
        if isinstance(value, (set, frozenset)):
            return type(value).__name__, sorted(repr(self(inner)) for inner in value)
        if isinstance(value, Mapping) and not hasattr(value, "to_dict"):
            return type(value).__name__, [(self(name), self(inner)) for name, inner in value.items()]
        if isinstance(value, Tensor):
            return "tensor", *checksum(value)
        if isinstance(value, CodeType):
            return self._of_code(value)
        if isinstance(value, functools.partial):
            return "partial", self(value.func), self(value.args), self(value.keywords)
        if isinstance(value, MethodType):
            return "method", self(value.__func__), _name(type(value.__self__))
        if isinstance(value, FunctionType):
            return self._of_function(value)
        if isinstance(value, type):
            return self.of_class(value)
        if isinstance(value, (BuiltinFunctionType, ModuleType, torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return type(value).__name__, getattr(value, "__name__", str(value))
        if hasattr(value, "to_dict"):  # a config of transformers, which many modules have
            if id(value) not in self._configs:
                self._configs[id(value)] = value, digest(value.to_dict())
            return _name(type(value)), self._configs[id(value)][1]
        if is_dataclass(value):
            return _name(type(value)), [self(getattr(value, field.name)) for field in fields(value)]
        raise Unknown(f"{type(value).__module__}.{type(value).__qualname__}")

    def or_class(self, value: Any) -> Any:
        """As a call; only the class of a value that has no text."""
        try:
            return self(value)
        except Unknown:
            return _name(type(value))

    def of_class(self, cls: type) -> Any:
        """The code of a class and of its bases; of libraries' bases only what others have put into them."""

        def told() -> Any:
            return [self._own(kind) for kind in cls.__mro__ if kind is not object]

        return _name(cls), self._once(cls, _name(cls), told)

    def _own(self, kind: type) -> list[tuple[str, Any]]:
        named = ((name, value) for name, value in sorted(vars(kind).items()) if name not in _OF_CLASSES)
        if not _is_around(kind.__module__):
            return [(name, self._of_member(value)) for name, value in named]
        functions = ((name, function) for name, value in named for function in _functions(value))
        return [(name, self(function)) for name, function in functions if not _is_around(_module_of(function))]

    def _of_member(self, value: Any) -> Any:
        functions = list(_functions(value))
        return [self(function) for function in functions] if functions else self.or_class(value)

    def _of_function(self, function: FunctionType) -> Any:
        if _is_around(_module_of(function)):
            return f"{_module_of(function)}.{function.__qualname__}"

        def told() -> Any:
            inside = [(name, self.or_class(value)) for name, value in _enclosed(function)]
            defaults = self.or_class(function.__defaults__), self.or_class(function.__kwdefaults__)
            named = [(name, function.__globals__.get(name)) for name in function.__code__.co_names]
            around = [(name, self.or_class(value)) for name, value in named if not isinstance(value, ModuleType)]
            return self._of_code(function.__code__), inside, defaults, around

        return self._once(function, function.__qualname__, told)

    def _once(self, key: Any, name: str, told: Callable[[], Any]) -> str:
        """The digest of what is told of a class or function; its `name` where it comes across itself meanwhile."""
        if key not in self._known:
            self._known[key] = name
            try:
                self._known[key] = digest(told())
            except BaseException:
                del self._known[key]  # the name alone would pass for all of it
                raise
        return self._known[key]

    def _of_code(self, code: CodeType) -> tuple:
        constants = [self(constant) for constant in code.co_consts]
        return code.co_code, constants, code.co_names, code.co_varnames, code.co_flags


def of_infuse() -> str:
    """Digest of our own code on the disk, and of the kernels. Unknown if it is not the code that runs."""
    library = native.library()
    return digest(_of_code(), None if library is None else _of_file(library))


@functools.cache
def _of_code() -> str:
    found = hashlib.sha256()
    for path in sorted(_ROOT.rglob("*.py")):
        if path.stat().st_mtime > _IMPORTED:
            raise Unknown(f"infuse's own code: {path} was written after it was imported")
        found.update(f"{path.relative_to(_ROOT)} {path.stat().st_size} ".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


@functools.cache
def _of_file(path: Path) -> int:
    return crc32(path.read_bytes())


def of_machine(device: torch.device) -> tuple:
    """Versions, the processor, and settings that change numbers."""
    found = Device.of(device)
    variables = sorted((name, value) for name, value in os.environ.items() if name.startswith("INFUSE_"))
    return (
        (sys.version, torch.__version__, metadata.version("transformers")),
        (found.kind, found.name, found.features, native.isa()),
        (
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            str(torch.get_default_dtype()),
        ),
        [(name, value) for name, value in variables if name not in _NOT_ASKED],
    )


def checksum(tensor: Tensor) -> tuple:
    """Shape, dtype and CRC-32 of a tensor's values."""
    return tuple(tensor.shape), str(tensor.dtype), sum_of(tensor)


def sum_of(tensor: Tensor, before: int = 0) -> int:
    """CRC-32 of a tensor's values, after those whose CRC-32 is `before`."""
    if not is_plain(tensor):
        raise Unknown(f"a tensor of {type(tensor).__name__}, or without values")
    return crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy(), before)


def digest(*values: Any) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()


def _enclosed(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Names that a function has from the one around it, with their values."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a name that is bound later
            yield name, cell.cell_contents


def _is_around(module: str) -> bool:
    """Whether code is named by the versions of PyTorch and transformers."""
    package = module.partition(".")[0]
    if package == "transformers":
        return not module.startswith("transformers.models.")
    return package in ("torch", "infuse", "builtins") or package in sys.stdlib_module_names


def _module_of(function: Any) -> str:
    """The module in which a function was written, which `functools.wraps` does not change."""
    return str(function.__globals__.get("__name__", "")) if isinstance(function, FunctionType) else ""


def _functions(value: Any) -> Iterable[FunctionType]:
    """The functions of a member of a class: methods, class methods, both halves of properties."""
    halves = (value.fget, value.fset) if isinstance(value, property) else (getattr(value, "__func__", value),)
    return (half for half in halves if isinstance(half, FunctionType))


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
