"""Digests of decisions, from the fields of their dataclasses: equal in all processes and versions that decide alike."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def digest_of(*values: Any) -> str:
    """Digest of dataclasses, tuples, mappings by text, numbers, texts and None, nested in each other.

    Fields that are as by default do not count, so that a new field leaves the digests of old decisions as they are.
    """
    told = json.dumps([_told(value) for value in values], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _told(value: Any) -> Any:
    """The value for JSON: of dataclasses, the class and the fields that are not as by default."""
    if isinstance(value, (tuple, list)):
        return [_told(one) for one in value]
    if isinstance(value, Mapping):
        return {name: _told(one) for name, one in value.items()}
    if not is_dataclass(value):
        return value
    told = {one.name: getattr(value, one.name) for one in fields(value) if one.compare}
    defaults = {one.name: one.default for one in fields(value)}
    return [type(value).__name__, {name: _told(one) for name, one in told.items() if one != defaults[name]}]
