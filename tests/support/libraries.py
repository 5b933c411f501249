"""Classes that pass for other libraries'."""

from __future__ import annotations

from typing import Any


def stand_in(name: str, base: type, **members: Any) -> type:
    """A class with the name and the module of another library's."""
    module, _, cls = name.rpartition(".")
    return type(cls, (base,), {"__module__": module, **members})
