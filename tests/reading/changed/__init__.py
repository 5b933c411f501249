"""Layers with one small change each. Every file ends with its cases, and then with variants of them."""

from __future__ import annotations

from tests.reading.changed import (
    attention,
    caches,
    conditions,
    effects,
    encoder,
    mlp,
    norms,
    rotary,
    scores,
    sizes,
    state,
    stream,
    writes,
)

_FILES = (stream, attention, scores, rotary, caches, mlp, norms, sizes, conditions, state, writes, effects, encoder)
CASES = {case.name: case for file in _FILES for case in file.CASES}
VARIANTS = {case.name: case for file in _FILES for case in file.VARIANTS}
BY_NAME = CASES | VARIANTS
assert len(BY_NAME) == sum(len(file.CASES) + len(file.VARIANTS) for file in _FILES), "two cases have one name"
