"""InstanceMethod: what an instance has in place of a method of its class, with the signature and names of that method.

Libraries filter keywords by a method's signature, wrap it under its name and docstring, or bind its function anew.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from functools import update_wrapper, wraps
from types import MethodType
from typing import Any


class InstanceMethod:
    """Calls function(instance, ...), and looks like the bound method `name` of the instance's class.

    It is none itself: a bound method is pickled by its name, and would come back as the class's own. A copy of the
    instance gets a method that is bound to the copy.
    """

    __slots__ = ("__self__", "__weakref__", "_bound", "_function", "_name", "_replaced")

    def __init__(self, function: Callable[..., Any], instance: Any, name: str):
        self.__self__, self._function, self._name = instance, function, name
        self._bound: Callable[..., Any] | None = None  # `__func__`,
        self._replaced: Any = None  # and the function whose place it takes

    def __init_subclass__(cls) -> None:
        # Instances read that of the function, not of their class.
        cls.__doc__ = InstanceMethod.__dict__["__doc__"]  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self.__self__, *args, **kwargs)

    @property
    def function(self) -> Any:
        """The function of the instance that a call runs."""
        return self._function

    @property
    def replaced(self) -> Callable[..., Any]:
        """The function, not bound to the instance, whose place this method takes."""
        return getattr(type(self.__self__), self._name)

    @property
    def __func__(self) -> Any:
        """This method as a function of an instance: of this one, of another with a method like it, or of any other,
        for which it is the function that this method replaces.
        """
        replaced = self.replaced
        if self._bound is None or self._replaced is not replaced:
            self._bound, self._replaced = _function_of(self, replaced), replaced
        return self._bound

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # for `inspect.ismethod`, by which `inspect.signature` reads `__func__`
        return MethodType

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self.__func__.__doc__

    def __getattr__(self, name: str) -> Any:
        """Read `__name__`, `__code__` and the like of the replaced function, as a bound method does of its own."""
        if name == "__wrapped__":
            return self.__func__.__wrapped__
        if name.startswith("__") and name != "__func__":
            return getattr(self.replaced, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def bound_to(self, instance: Any) -> InstanceMethod:
        """This method of another instance."""
        return type(self)(self._function, instance, self._name)

    def __eq__(self, other: object) -> bool:
        alike = type(other) is type(self) and other.__self__ is self.__self__  # type: ignore[attr-defined]
        return alike and other._name == self._name  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((id(self.__self__), self._name))

    def __repr__(self) -> str:
        return f"<bound method {self.__func__.__qualname__} of {self.__self__!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._function, self.__self__, self._name)


def while_it_has(attribute: str, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the function of an InstanceMethod to call the class's method `name` on an instance without `attribute`:
    one from which our methods were taken off, while somebody has put a function around one.
    """

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            run = function if attribute in vars(self) else getattr(type(self), name)
            return run(self, *args, **kwargs)

        return called

    return decorated


REDUCE = "__reduce_ex__"


def rebind_in_copies(instance: Any) -> None:
    """Let `copy.copy(instance)` have InstanceMethods of its own. (Deep copies and pickles bind them anyway.)"""
    setattr(instance, REDUCE, InstanceMethod(_reduce, instance, REDUCE))


def _reduce(instance: Any, protocol: Any) -> Any:
    if sys._getframe(2).f_code is copy.copy.__code__:
        return _copied, (instance,)
    reduce: Any = type(instance).__reduce_ex__
    return reduce(instance, protocol)


def _copied(instance: Any) -> Any:
    made = object.__new__(type(instance))
    vars(made).update(vars(instance))
    for name, method in vars(instance).items():
        if issubclass(type(method), InstanceMethod):
            vars(made)[name] = method.bound_to(made)
    return made


def unbound(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a bound method. Of any other callable, a function that ignores its first argument."""
    if inspect.ismethod(method):
        return method.__func__

    @wraps(method)
    def function(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    signature = inspect.signature(method)
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    function.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[first, *signature.parameters.values()]
    )
    return function


def _function_of(method: InstanceMethod, replaced: Callable[..., Any]) -> Callable[..., Any]:
    def function(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self is method.__self__:
            return method(*args, **kwargs)
        own = getattr(self, method._name, None)
        if isinstance(own, InstanceMethod) and own.__self__ is self:
            return own(*args, **kwargs)
        return replaced(self, *args, **kwargs)

    update_wrapper(function, replaced)
    # As the replaced method has it: without its decorators, of which one may turn gradients off.
    function.__wrapped__ = getattr(replaced, "__wrapped__", replaced)  # type: ignore[attr-defined]
    return function
