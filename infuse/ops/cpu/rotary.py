"""The rotary embedding and the append of ops/rotary.py in C++ (src/rotary.h).

A kernel returns None for unsupported arguments.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from infuse.native import kernels, needs
from infuse.ops.rotary import rotary, rotary_append


@rotary.implement("cpu", needs)
def _rotary(*arguments: Any) -> Any:
    out = kernels().rotary.default(*arguments)
    return rotary.body("torch")(*arguments) if out is None else out


@rotary_append.implement("cpu", needs)
def _rotary_append(qkv: Tensor, cos: Any, sin: Any, keys: Tensor, values: Tensor, start: Any, *rest: Any) -> Any:
    args = qkv, cos, sin, keys, values, int(start), *rest
    out = kernels().rotary_append.default(*args)
    return rotary_append.body("torch")(*args) if out is None else out
