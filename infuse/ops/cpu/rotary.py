"""The rotary embedding and the append of ops/rotary.py in C++ (src/rotary.h).

A kernel returns None for unsupported arguments.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from infuse.native import kernels, needs
from infuse.ops.rotary import rotary, rotary_append


@rotary.implement("cpu", needs)
def _rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Any:
    out = kernels().rotary.default(x, cos, sin, interleaved)
    return rotary.body("torch")(x, cos, sin, interleaved) if out is None else out


@rotary_append.implement("cpu", needs)
def _rotary_append(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, keys: Tensor, values: Tensor, start: int | Tensor, heads: int,
    interleaved: bool,
) -> Any:  # fmt: skip
    start = int(start)
    out = kernels().rotary_append.default(qkv, cos, sin, keys, values, start, heads, interleaved)
    return rotary_append.body("torch")(qkv, cos, sin, keys, values, start, heads, interleaved) if out is None else out
