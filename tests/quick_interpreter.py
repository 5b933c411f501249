"""Triton's interpreter without what it does again at every call of one kernel function by another: import for effect.

The interpreter maps `triton.language` onto itself at each such call, which takes half of its time. The launch has
already done so; the first call has done so for `triton.language.core`, which only the library's own functions use.
"""

from __future__ import annotations

import os
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
