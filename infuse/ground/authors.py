"""Who wrote a class or function: the library that a model comes from, or its user, by a subclass or a patch.

A replacement computes what the library's class computes. It cannot know what a user's code does for inputs that a proof
did not try, so the user's code keeps running.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

# Packages whose classes infuse knows, and those that wrap their methods without changing what they compute.
LIBRARIES = frozenset({"torch", "transformers", "diffusers", "huggingface_hub", "infuse"})
# A subclass that overrides only these computes what its base does: the instance shows the effect of `__init__`.
_OF_CONSTRUCTION = frozenset(
    {"__init__", "__new__", "__init_subclass__", "__class_getitem__", "__repr__", "extra_repr"}
)


# What runs when a module is called, and where its attributes come from.
_CALL = ("forward", "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__getattribute__")


def package_of(cls: type) -> str:
    """The top-level package of a class: "transformers"."""
    return cls.__module__.partition(".")[0]


def is_librarys(function: Any, libraries: Collection[str] = LIBRARIES) -> bool:
    """Whether a callable, and everything that it wraps, was written in one of the libraries (or Python's own).

    The code decides, not `__module__`, which `functools.wraps` copies to a user's wrapper.
    """
    packages = {_package_of(wrapped) for wrapped in with_wrapped(function)}
    return all(package in libraries or package in sys.stdlib_module_names for package in packages)


def with_wrapped(function: Any) -> Iterator[Any]:
    """The callable and the functions that it wraps: those in its closure, of a partial or method, `__wrapped__`."""
    waiting, seen = [function], set()
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        contents = [getattr(current, "__wrapped__", None), getattr(current, "__func__", None)]
        if isinstance(current, FunctionType):
            contents += [cell.cell_contents for cell in current.__closure__ or () if _is_filled(cell)]
        elif isinstance(current, functools.partial):
            contents.append(current.func)
        waiting += [inner for inner in contents if isinstance(inner, (FunctionType, MethodType, functools.partial))]


def _package_of(function: Any) -> str:
    if isinstance(function, FunctionType):
        return function.__globals__.get("__name__", "").partition(".")[0]
    if type(function) is MethodType:  # not one of ours, which passes for a method of the user's class
        owner = function.__self__
        return package_of(owner if isinstance(owner, type) else type(owner))
    return package_of(function if isinstance(function, type) else type(function))


def users_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether a user has put a hook around a module's forward."""
    return are_users(hooks for module in modules for hooks in (module._forward_pre_hooks, module._forward_hooks))


def are_users(hooks: Iterable[dict[int, Callable]]) -> bool:
    """Whether there is a user's among some modules' hooks."""
    return not all(is_librarys(hook) for each in hooks if each for hook in each.values())


def users_methods(cls: type, libraries: Collection[str] = LIBRARIES) -> Iterator[str]:
    """Methods of a library's class that a user's subclass overrides or that were patched, as "Class.method".

    Methods that a subclass adds, and its `__init__`, do not count. If a user's class derives from nn.Module directly,
    its forward counts, unless `libraries` lacks "torch".
    """
    for i, kind in enumerate(cls.__mro__):
        if kind in (object, nn.Module):
            continue
        for name, value in list(vars(kind).items()):
            if name in _OF_CONSTRUCTION or all(is_librarys(method, libraries) for method in _functions(value)):
                continue
            if any(package_of(base) in libraries and name in vars(base) for base in cls.__mro__[i:]):
                yield f"{kind.__name__}.{name}"


class LibraryCalls:
    """Tells whether calls of modules run only a library's methods: their forwards, and the methods that these name.

    It remembers its answer for each class, and reads the class again only if a method was replaced.
    """

    def __init__(self, libraries: Collection[str] = LIBRARIES) -> None:
        self._libraries = libraries
        self._known: dict[type, tuple[dict[str, Any], bool]] = {}

    def __call__(self, modules: Iterable[nn.Module]) -> bool:
        """Whether no module runs a method that a user overrides in a subclass, has patched, or has set on it."""
        modules = list(modules)
        if not all(map(self._is_librarys, {type(module) for module in modules})):
            return False
        owned = [(vars(module), self._known[type(module)][0]) for module in modules]
        there = (attributes[name] for attributes, methods in owned for name in attributes.keys() & methods.keys())
        return all(is_librarys(attribute, self._libraries) for attribute in there)

    def __reduce__(self) -> tuple:
        return LibraryCalls, (self._libraries,)

    def _is_librarys(self, cls: type) -> bool:
        known_methods, all_librarys = self._known.get(cls, (None, False))
        if known_methods is None or any(getattr(cls, name, None) != value for name, value in known_methods.items()):
            methods = _called(cls)
            functions = [function for value in methods.values() for function in _functions(value)]
            all_librarys = all(is_librarys(function, self._libraries) for function in functions)
            self._known[cls] = {name: getattr(cls, name, None) for name in methods}, all_librarys
        return all_librarys


def _called(cls: type) -> dict[str, Any]:
    """The methods that a call of a module of the class may run, by name."""
    there = {name: value for kind in reversed(cls.__mro__) for name, value in vars(kind).items()}
    methods: dict[str, Any] = {}
    waiting = list(_CALL)
    while waiting:
        name = waiting.pop()
        value = None if name in methods else there.get(name)
        if functions := _functions(value):
            methods[name] = value
            if vars(nn.Module).get(name) is not value:
                waiting += [word for function in functions for word in words_of(function)]
    return methods


def words_of(function: Any) -> Iterator[str]:
    """Every attribute and text in the code of a function and of what it wraps."""
    for wrapped in with_wrapped(function):
        if isinstance(wrapped, FunctionType):
            yield from _words(wrapped.__code__)


def _words(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from _texts(code.co_consts)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _words(inner)


def _texts(values: tuple[Any, ...]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, tuple):
            yield from _texts(value)


def _functions(value: Any) -> list[Callable[..., Any]]:
    """The functions that an attribute of a class calls; none for plain data and nested classes."""
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, property):
        return [accessor for accessor in (value.fget, value.fset, value.fdel) if accessor is not None]
    if isinstance(value, (functools.cached_property, functools.partialmethod)):
        return [value.func]
    return [value] if callable(value) and not isinstance(value, type) else []


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # raises for a name that is not assigned yet
    except ValueError:
        return False
    return True
