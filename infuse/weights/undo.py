"""Reversible changes to a model's mappings (modules, parameters, hooks)."""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import ExitStack
from typing import Any


def put(undo: ExitStack, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
    """Set mapping[key] = value; closing `undo` restores the previous entry."""
    if key in mapping:
        undo.callback(mapping.__setitem__, key, mapping[key])
    else:
        undo.callback(mapping.pop, key, None)
    mapping[key] = value


def take_out(undo: ExitStack, mapping: MutableMapping[Any, Any], key: Any) -> None:
    """Remove mapping[key], if it is there; closing `undo` restores it."""
    if key in mapping:
        undo.callback(mapping.__setitem__, key, mapping.pop(key))
