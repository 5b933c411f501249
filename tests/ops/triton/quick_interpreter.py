"""Triton's interpreter without what it does again and again: import for effect.

- It maps `triton.language` onto itself at each call of one kernel function by another. The launch has already done so;
  the first call has done so for `triton.language.core`, which only the library's own functions use.
- It computes each sum and product of integers a second time in 64 bits, for an assertion that is off.
- It makes the type and the shape of each value anew, and compares shapes part by part.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.language import core, semantic
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

    unwrap_any, already_plain = core._unwrap_if_constexpr, {int, float, bool, str, core.dtype, core.tensor}

    def unwrap(value: Any) -> Any:
        if type(value) is core.constexpr:
            return value.value
        return value if type(value) in already_plain else unwrap_any(value)

    core._unwrap_if_constexpr = unwrap

    make_block_type, block_types = core.block_type.__init__, {}
    core.dtype.sizes, core.block_type.sizes = (), None

    def block_type(self: core.block_type, element_ty: core.dtype, shape: Any) -> None:
        sizes = tuple(map(unwrap, shape))
        key = (element_ty.name, sizes)
        if key not in block_types:
            make_block_type(self, element_ty, shape)
            block_types[key] = {**vars(self), "sizes": sizes}
        vars(self).update(block_types[key])

    core.block_type.__init__ = block_type

    broadcast_any = semantic.TritonSemantic.broadcast_impl_value

    def broadcast(self: Any, lhs: core.tensor, rhs: core.tensor) -> tuple[core.tensor, core.tensor]:
        if lhs.type.sizes is not None and lhs.type.sizes == rhs.type.sizes:
            return lhs, rhs
        return broadcast_any(self, lhs, rhs)

    semantic.TritonSemantic.broadcast_impl_value = broadcast

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
