"""RankBackend: capture by ranks that share a model.

If capture fails on any rank, all ranks run eagerly. `Group` knows which collectives can be captured.

NCCL requires that a collective is part of a graph either on all ranks or on none. Ranks therefore compare results after
the warm run and after the capture. The exchange at the beginning of every call also compares which graphs they keep. A
replay needs no exchange of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from infuse.graphs.capture import Backend, Captured
from infuse.graphs.runner import where
from infuse.ground.errors import RankError
from infuse.parallel.group import Group

_T = TypeVar("_T")
_UNLIKE = "the ranks have left different numbers of operations to the device"


class RankBackend:
    """The capture backend of one rank, which captures in step with the other ranks."""

    def __init__(self, backend: Backend, group: Group):
        self._backend, self._group = backend, group

    def warm(self, run: Callable[[], _T]) -> _T:
        """Run once on all ranks. If all fail after equally many collectives, raise each rank's own error.

        Otherwise the group has failed, because ranks wait for collectives that never come: raise RankError on all
        ranks, except torch.OutOfMemoryError, which is raised as it is.
        """
        result, error = None, None
        try:
            result = self._backend.warm(run)
        except RankError:
            raise
        except Exception as raised:
            error = raised
        failed, alike = self._failed(error, "a step before its capture")
        if error is not None and all(failed) and alike:
            raise error
        if any(failed) or not alike:
            fault = self._group.any_fault(_said(error), "the errors of a step before its capture")
            lost = self._group.failed(f"a step before its capture: {fault or _UNLIKE}")
            if isinstance(error, torch.OutOfMemoryError):
                raise error
            raise lost from error
        return result  # type: ignore[return-value]

    def capture(self, run: Callable[[], _T]) -> tuple[Captured, _T]:
        """Capture on all ranks or raise RuntimeError on all. A capture runs nothing, so all can continue without one.

        Raise RankError if ranks have queued different numbers of collectives.
        """
        captured, error = None, None
        try:
            with self._group.recorded():
                captured = self._backend.capture(run)
        except Exception as raised:
            error = raised
        failed, alike = self._failed(error, "a capture")
        if not alike:
            raise self._group.failed(f"a capture: {_UNLIKE}") from error
        if any(failed):
            captured = None
            fault = self._group.any_fault(_said(error), "the errors of a capture")
            raise RuntimeError(str(fault)) from error
        assert captured is not None
        captured[0].nbytes = max(
            nbytes for (nbytes,) in self._group.numbers([captured[0].nbytes], "the memory of a graph")
        )
        return captured

    def _failed(self, error: Exception | None, what: str) -> tuple[list[bool], bool]:
        """Return which ranks failed, and whether the next call's collectives will pair: all queued equally many."""
        failed, queued = zip(*self._group.numbers([error is not None, self._group.queued()], what), strict=True)
        return [bool(each) for each in failed], len(set(queued)) == 1

    def capturing(self) -> bool:
        return self._backend.capturing()

    def turn(self) -> Any:
        return self._backend.turn()


def _said(error: Exception | None) -> str | None:
    return None if error is None else where(error)
