"""Digests of decisions from their dataclass fields, equal for equal decisions in all processes and versions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def digest_of(*values: Any) -> str:
    """Digest nested dataclasses, tuples, mappings with string keys, numbers, strings and None.

    Fields with their default value are skipped, so that a new field does not change the digests of old decisions.
    """
    told = json.dumps([_told(value) for value in values], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _told(value: Any) -> Any:
    """Convert the value for JSON; a dataclass becomes its class name and its non-default fields."""
    if isinstance(value, (tuple, list)):
        return [_told(element) for element in value]
    if isinstance(value, Mapping):
        return {name: _told(element) for name, element in value.items()}
    if not is_dataclass(value):
        return value
    told = {field.name: getattr(value, field.name) for field in fields(value) if field.compare}
    defaults = {field.name: field.default for field in fields(value)}
    return [type(value).__name__, {name: _told(content) for name, content in told.items() if content != defaults[name]}]
