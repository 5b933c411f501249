"""Questions to a model that it may be unable to answer: its attributes, and its methods without arguments.

A model's class may leave out what transformers' others have, or raise where it cannot say: SpeechT5's decoder raises
NotImplementedError for its embeddings. A caller then goes on without what it asked for.
"""

from __future__ import annotations

import inspect
from typing import Any


def attribute(owner: Any, path: str, otherwise: Any = None) -> Any:
    """The attribute at a dotted path, `otherwise` if there is none or reading it raises any error."""
    value = owner
    try:
        for name in path.split("."):
            value = getattr(value, name)
    except Exception:
        return otherwise
    return value


def returned(owner: Any, method: str, otherwise: Any = None) -> Any:
    """What a method returns without arguments, `otherwise` if there is none or calling it raises any error."""
    try:
        return getattr(owner, method)()
    except Exception:
        return otherwise


def parameters(owner: Any, method: str) -> set[str]:
    """The names of a method's parameters; none if there is no such method or its signature cannot be read."""
    try:
        return set(inspect.signature(getattr(owner, method)).parameters)
    except Exception:
        return set()
