"""Pickle modules that hold kernels: by the kernels' names, which are looked up when the pickle is read."""

from __future__ import annotations

from typing import Any

from torch import nn

from infuse import ops


class Pickled(nn.Module):
    """A module with bodies of ops, or their functions, among its attributes.

    Unpickling raises UnsupportedCall if a body cannot run here, because the weights have that body's layout.
    """

    def __getstate__(self) -> dict[str, Any]:
        return {name: ops.by_name(value) for name, value in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(
            {name: value.found() if isinstance(value, ops.BodyName) else value for name, value in state.items()}
        )
