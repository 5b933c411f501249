"""How the results of ranks become one: added up after a row split, put side by side after a column split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from infuse.parallel.group import Group

Combine = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Sum:
    """Each rank's part of a sum, added up. `what` is the module, for errors."""

    group: Group
    what: str

    def __call__(self, part: Tensor) -> Tensor:
        return self.group.all_reduce(part, self.what)


@dataclass(frozen=True)
class SideBySide:
    """Each rank's `widths` of the last axis, side by side."""

    group: Group
    widths: tuple[int, ...]
    what: str

    def __call__(self, part: Tensor) -> Tensor:
        return self.group.all_gather(part, self.widths, -1, self.what)
