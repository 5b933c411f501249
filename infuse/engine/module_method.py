"""Methods of an engine that look like the same method of its model."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch.compiler import is_compiling

from infuse.ground.instance_method import InstanceMethod, unbound


class ModuleMethod(InstanceMethod):
    """A method of an engine, made as it is asked for: one that the engine held would keep it from being freed."""

    __slots__ = ()

    @property
    def replaced(self) -> Callable[..., Any]:
        method = getattr(self.__self__.module, self._name, None)
        return self._function if method is None else unbound(method)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.__self__, self._name)


class like_modules:  # noqa: N801  # a decorator
    """Make a method of an engine look like the method of this name of its `module`, where that has one."""

    def __init__(self, function: Callable[..., Any]):
        self._function, self._name = function, function.__name__

    def __get__(self, engine: Any, owner: type | None = None) -> Any:
        if engine is None:
            return self._function
        if is_compiling():
            return MethodType(self._function, engine)
        return ModuleMethod(self._function, engine, self._name)
