"""Combine the results of ranks: all-reduce after a row-parallel product, all-gather after a column-parallel one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from infuse.parallel.group import Group

Combine = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Sum:
    """All-reduce. `what` names the module in errors."""

    group: Group
    what: str

    def __call__(self, part: Tensor) -> Tensor:
        return self.group.all_reduce(part, self.what)


@dataclass(frozen=True)
class SideBySide:
    """All-gather along the last axis; `widths` are the ranks' sizes."""

    group: Group
    widths: tuple[int, ...]
    what: str

    def __call__(self, part: Tensor) -> Tensor:
        return self.group.all_gather(part, self.widths, -1, self.what)
