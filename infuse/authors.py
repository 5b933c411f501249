"""Who wrote a class or function: the library that a model comes from, or its user, by a subclass or a patch.

A replacement computes what the library's class computes. It cannot know what a user's own code does for other inputs
than those of a proof, so whatever is the user's keeps running.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch import nn

# Packages whose classes infuse knows, and those that wrap their methods without changing what they compute.
LIBRARIES = frozenset({"torch", "transformers", "diffusers", "infuse"})
# A subclass that differs in these alone computes what its base does: what `__init__` makes is seen in the instance.
_OF_CONSTRUCTION = frozenset(
    {"__init__", "__new__", "__init_subclass__", "__class_getitem__", "__repr__", "extra_repr"}
)


def package_of(cls: type) -> str:
    """The top-level package of a class: "transformers"."""
    return cls.__module__.partition(".")[0]


def is_librarys(function: Any, libraries: Collection[str] = LIBRARIES) -> bool:
    """Whether a callable, and everything that it wraps, was written in one of the libraries (or Python's own).

    The code decides, not `__module__`, which `functools.wraps` copies to a user's wrapper.
    """
    waiting, seen = [function], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, FunctionType):
            package = one.__globals__.get("__name__", "").partition(".")[0]
            wrapped = [cell.cell_contents for cell in one.__closure__ or () if _is_filled(cell)]
            waiting += [inner for inner in wrapped if isinstance(inner, (FunctionType, MethodType, functools.partial))]
        elif isinstance(one, functools.partial):
            package = "functools"
            waiting.append(one.func)
        elif isinstance(one, MethodType):
            package = package_of(type(one.__self__)) if not isinstance(one.__self__, type) else package_of(one.__self__)
            waiting.append(one.__func__)
        elif isinstance(one, BuiltinFunctionType):
            package = "builtins"
        else:
            package = package_of(one if isinstance(one, type) else type(one))
        if package not in libraries and package not in sys.stdlib_module_names:
            return False
        if (inner := getattr(one, "__wrapped__", None)) is not None:
            waiting.append(inner)
    return True


def users_methods(cls: type, libraries: Collection[str] = LIBRARIES) -> Iterator[str]:
    """Methods of a library's class that a user's subclass overrides or that were patched, as "Class.method".

    Methods that a subclass adds, and its `__init__`, do not count. A class that is the user's from nn.Module on has
    its forward here, unless "torch" is not among `libraries`.
    """
    for i, kind in enumerate(cls.__mro__):
        if kind in (object, nn.Module):
            continue
        for name, value in list(vars(kind).items()):
            if name in _OF_CONSTRUCTION or all(is_librarys(one, libraries) for one in _functions(value)):
                continue
            if any(package_of(base) in libraries and name in vars(base) for base in cls.__mro__[i:]):
                yield f"{kind.__name__}.{name}"


def _functions(value: Any) -> list[Callable[..., Any]]:
    """The functions that an attribute of a class calls; none for plain data and nested classes."""
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, property):
        return [one for one in (value.fget, value.fset, value.fdel) if one is not None]
    if isinstance(value, (functools.cached_property, functools.partialmethod)):
        return [value.func]
    return [value] if callable(value) and not isinstance(value, type) else []


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # raises for a name that is not assigned yet
    except ValueError:
        return False
    return True
