"""Modules that pickle: a pickle has their kernels by name, and looks them up where it is read."""

from __future__ import annotations

from typing import Any

from torch import nn

from infuse import ops


class Pickled(nn.Module):
    """A module that keeps bodies of ops, or their functions, among its attributes.

    Reading a pickle raises UnsupportedCall where one of its bodies cannot run: weights lie as that body wants them.
    """

    def __getstate__(self) -> dict[str, Any]:
        return {name: ops.by_name(value) for name, value in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(
            {name: value.found() if isinstance(value, ops.BodyName) else value for name, value in state.items()}
        )
