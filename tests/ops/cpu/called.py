"""Run C++ bodies and see that their kernel ran, not the function that takes what it declines."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from infuse.ground.modes import Transparent
from infuse.ops import registered


class _Calls(Transparent, TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def calls_kernel(name: str, *args: Any) -> tuple[Any, bool]:
    """The result of an op's C++ body, and whether its kernel of the same name ran."""
    with _Calls() as calls:
        found = registered()[name].body("cpu")(*args)
    return found, f"infuse_cpu.{name}.default" in calls.names


def by_kernel(name: str, *args: Any) -> Any:
    """The result of an op's C++ body, by its kernel."""
    found, called = calls_kernel(name, *args)
    assert called, f"{name}: the kernel did not run"
    return found
