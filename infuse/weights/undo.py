"""UndoLog: reversible changes to a model's mappings (modules, parameters, hooks)."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

_MISSING = object()


class UndoLog:
    """Record the value that each `put` replaces."""

    def __init__(self) -> None:
        self._before: list[tuple[MutableMapping[Any, Any], Any, Any]] = []

    def put(self, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        """Set mapping[key] = value, reversible by `take_back`."""
        self._before.append((mapping, key, mapping.get(key, _MISSING)))
        mapping[key] = value

    def take_back(self) -> None:
        """Restore the previous entries of all mappings."""
        for mapping, key, value in reversed(self._before):
            if value is _MISSING:
                mapping.pop(key, None)
            else:
                mapping[key] = value
        self.forget()

    def forget(self) -> None:
        """Keep the changes: clear the log."""
        self._before.clear()
