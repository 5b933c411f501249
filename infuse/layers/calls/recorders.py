"""transformers' hooks that record outputs: they stay on a model for good after its first call that asks for outputs.

They do nothing in other calls, so such a module may be computed without being called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

_RECORDERS = "transformers.utils.output_capturing"  # not imported: a hook of its functions knows their globals
_COLLECTOR = "_active_collector"  # its get() is what the running call collects: None or empty if nothing


def has_active_hooks(module: nn.Module) -> bool:
    """Whether a forward hook on the module may read or change what it returns in the running call."""
    hooks = module._forward_hooks
    return bool(hooks) and not all(map(_is_idle, hooks.values()))


def has_recorders_alone(module: nn.Module) -> bool:
    """Whether the module's hooks are transformers' recorders, which look at the first argument and the result."""
    hooks = module._forward_hooks.values()
    alone = all(getattr(hook, "__module__", None) == _RECORDERS for hook in hooks)
    return alone and not module._forward_pre_hooks and "forward" not in vars(module)


def _is_idle(hook: Callable[..., Any]) -> bool:
    """Whether it is a recorder while nothing is recorded. A version of transformers that works otherwise: never."""
    if getattr(hook, "__module__", None) != _RECORDERS:
        return False
    collected = getattr(getattr(hook, "__globals__", {}).get(_COLLECTOR), "get", None)
    return collected is not None and not collected()
