"""UndoLog: changes of a model's mappings (modules, parameters, hooks) that can be taken back."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

_MISSING = object()


class UndoLog:
    """Remembers what each `put` replaced."""

    def __init__(self) -> None:
        self._before: list[tuple[MutableMapping[Any, Any], Any, Any]] = []

    def put(self, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        """mapping[key] = value, until it is taken back."""
        self._before.append((mapping, key, mapping.get(key, _MISSING)))
        mapping[key] = value

    def take_back(self) -> None:
        """Give every mapping what it had."""
        for mapping, key, value in reversed(self._before):
            if value is _MISSING:
                mapping.pop(key, None)
            else:
                mapping[key] = value
        self.forget()

    def forget(self) -> None:
        """What was put stays."""
        self._before.clear()
