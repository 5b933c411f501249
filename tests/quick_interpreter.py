"""Triton's interpreter without what it does again and again: import for effect.

- It maps `triton.language` onto itself at each call of one kernel function by another. The launch has already done so;
  the first call has done so for `triton.language.core`, which only the library's own functions use.
- It computes each sum and product of integers a second time in 64 bits, for an assertion that is off.
- It makes the type and the shape of each value anew.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.language import core
    from triton.runtime import interpreter

    call_and_map = interpreter.InterpretedFunction.__call__

    def call(self: interpreter.InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        if core in self.fn.__globals__.values() and core.is_builtin(core.load):
            return call_and_map(self, *args, **kwargs)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)

    make_block_type, block_types = core.block_type.__init__, {}

    def block_type(self: core.block_type, element_ty: core.dtype, shape: Any) -> None:
        key = (element_ty.name, *map(core._unwrap_if_constexpr, shape))
        if key not in block_types:
            make_block_type(self, element_ty, shape)
            block_types[key] = dict(vars(self))
        vars(self).update(block_types[key])

    core.block_type.__init__ = block_type

    shapes: dict[str, tuple[Any, Any]] = {}  # by the name of the type

    def tensor(self: core.tensor, handle: Any, type: core.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if type.name not in shapes:
            sizes = [core.constexpr(size) for size in type.shape] if type.is_block() else []
            shapes[type.name] = core.tuple(sizes), core.constexpr(type.numel if type.is_block() else 1)
        self.shape, self.numel = shapes[type.name]

    core.tensor.__init__ = tensor

    get_np_dtype, np_dtypes = interpreter._get_np_dtype, {}

    def np_dtype(type: core.dtype) -> Any:
        if type.name not in np_dtypes:
            np_dtypes[type.name] = get_np_dtype(type)
        return np_dtypes[type.name]

    interpreter._get_np_dtype = np_dtype
