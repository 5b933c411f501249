"""Hooks on a user's modules, or another forward, during a `with` block; nothing of them is left afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

from torch import nn


class TemporaryHooks(AbstractContextManager):
    """Registers hooks that do nothing after the `with` block, and are no longer on their modules.

    This holds even if registering raised after the hook was in place, or if a module's own method keeps it elsewhere.
    """

    def __init__(self) -> None:
        self._switch = _Switch()
        self._placed: list[tuple[nn.Module, Callable[..., Any]]] = []

    def before(self, module: nn.Module, hook: Callable[..., Any], **how: Any) -> None:
        """Call hook(module, args) before each forward, as `register_forward_pre_hook` does; `how` are its settings."""
        module.register_forward_pre_hook(self._placed_on(module, hook), **how)

    def after(self, module: nn.Module, hook: Callable[..., Any], **how: Any) -> None:
        """Call hook(module, args, output) after each forward, as `register_forward_hook` does."""
        module.register_forward_hook(self._placed_on(module, hook), **how)

    def close(self) -> None:
        self._switch.is_on = False
        for module, hook in self._placed:
            for kind in ("_forward_pre_hooks", "_forward_hooks"):
                hooks = getattr(module, kind)
                for number in [number for number, candidate in hooks.items() if candidate is hook]:
                    for name in (kind, f"{kind}_with_kwargs", f"{kind}_always_called"):
                        getattr(module, name, {}).pop(number, None)
        self._placed.clear()

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _placed_on(self, module: nn.Module, hook: Callable[..., Any]) -> Callable[..., Any]:
        placed = partial(_run, self._switch, hook)
        self._placed.append((module, placed))  # first, since registering may raise with the hook in place
        return placed


class _Switch:
    is_on = True


def _run(switch: _Switch, hook: Callable[..., Any], *args: Any) -> Any:
    return hook(*args) if switch.is_on else None


class StopModel(Exception):
    """Raised by the callbacks of `watched` to stop the model early."""


@contextmanager
def watched(
    modules: Mapping[str, nn.Module],
    before: Callable[[str, tuple, dict[str, Any]], None],
    after: Callable[[str, tuple, Any], None],
) -> Iterator[None]:
    """Call before(path, args, kwargs) and after(path, args, output) around each call of the modules.

    StopModel ends the `with` block without an error.
    """

    def enter(path: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        before(path, args, kwargs)

    def leave(path: str, module: nn.Module, args: tuple, output: Any) -> None:
        after(path, args, output)

    with suppress(StopModel), TemporaryHooks() as hooks:
        for path, module in modules.items():
            hooks.before(module, partial(enter, path), with_kwargs=True)
            hooks.after(module, partial(leave, path))
        yield


@contextmanager
def answered_by(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Context in which `module` runs `forward` instead of its own, which may be set on the instance."""
    instance_forward = vars(module).get("forward")
    module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.forward
        if instance_forward is not None:
            module.forward = instance_forward  # type: ignore[method-assign]
