"""Engines have the class name of what they hold: transformers and diffusers ask for a class by its name."""

from __future__ import annotations

from functools import cache
from typing import Any


class NamedAsHeld:
    """An object whose class is named as that of the object it stands for; its own name is in `__qualname__`.

    transformers' pipelines look `model.__class__.__name__` up in their tables, and decide by it how to decode speech.
    """

    def _name_as(self, held: Any) -> None:
        """Give this object a class that is named as that of `held`. `isinstance` answers as before."""
        kind: Any = type(self)
        object.__setattr__(self, "__class__", _named(kind, type(held).__name__))  # engines set others on `held`

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the class by what it is made from, since no module has it."""
        reduced: Any = super().__reduce_ex__(max(int(protocol), 2))
        _, (kind, *arguments), *state = reduced
        return _empty, (kind.__base__, kind.__name__, *arguments), *state


@cache  # so that engines of one kind of model, and their copies, are of one class
def _named(kind: type, name: str) -> type:
    return type(
        name, (kind,), {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    )


def _empty(kind: type, name: str) -> Any:
    """An object of such a class, which gets its state next."""
    made: Any = _named(kind, name)
    return made.__new__(made)
