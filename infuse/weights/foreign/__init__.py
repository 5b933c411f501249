"""Foreign layouts: tensors that a checkpoint stores under other names, in other shapes or in a number format.

A recogniser takes the unread tensors of a checkpoint and returns the model's tensors that it can build from them. Each
is one file and one entry in RECOGNISERS; `register` adds others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from infuse.weights.foreign.converted import converted
from infuse.weights.foreign.layout import Recognised, Recogniser, Unread
from infuse.weights.foreign.merged import merged
from infuse.weights.foreign.microscaled import microscaled
from infuse.weights.foreign.rotary import frequencies
from infuse.weights.lazy import LazyTensor

RECOGNISERS: tuple[Recogniser, ...] = (microscaled, merged, converted, frequencies)  # in this order

_registered: list[Recogniser] = []  # by `register`


def register(recogniser: Recogniser) -> Callable[[], None]:
    """Put a recogniser ahead of the built-in ones. Call the returned function to unregister it."""
    _registered.append(recogniser)
    return lambda: _registered.remove(recogniser)


def is_extended() -> bool:
    """Whether a recogniser is registered from outside."""
    return bool(_registered)


def recognised(unread: Unread) -> Recognised:
    """Run all recognisers in order. Each sees only the tensors that earlier ones left over."""
    tensors: dict[str, LazyTensor] = {}
    used: set[str] = set()
    faults: dict[str, str] = {}
    for recogniser in (*_registered, *RECOGNISERS):
        result = recogniser(unread)
        tensors |= result.tensors
        used |= result.used
        faults |= result.faults
        known = result.tensors.keys() | result.faults.keys()
        unread = replace(
            unread,
            names=tuple(name for name in unread.names if name not in result.used),
            by_name={name: stored for name, stored in unread.by_name.items() if stored not in result.used},
            shapes={name: shape for name, shape in unread.shapes.items() if name not in known},
        )
    return Recognised(tensors, used, faults)
