"""RankBackend: capture by ranks that share a model. If capture fails on any rank, all ranks run eagerly. `Group` knows
which collectives can be captured.

Whether a collective is part of a graph must be the same on all ranks (NCCL's rule). So the ranks compare results where
it is rare: after the run before a capture, after the capture, and, in the exchange that every call begins with, which
graphs they keep. A replay costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from infuse.errors import RankError
from infuse.graphs.capture import Backend, Captured
from infuse.graphs.runner import where
from infuse.parallel.group import Group

_T = TypeVar("_T")
_UNLIKE = "the ranks have left different numbers of operations to the device"


class RankBackend:
    """The capture backend of one rank, in step with the others'."""

    def __init__(self, backend: Backend, group: Group):
        self._backend, self._group = backend, group

    def warm(self, run: Callable[[], _T]) -> _T:
        """Run once. An error of all ranks after equally many collectives is raised as it is; of some ranks, as RankError
        on the others, which wait for the missing collectives in vain.
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
            fault = self._group.any_fault(
                None if error is None else where(error), "the errors of a step before its capture"
            )
            lost = self._group.failed(f"a step before its capture: {fault or _UNLIKE}")
            if isinstance(error, torch.OutOfMemoryError):
                raise error
            raise lost from error
        return result  # type: ignore[return-value]

    def capture(self, run: Callable[[], _T]) -> tuple[Captured, _T]:
        """Capture on all ranks, or raise RuntimeError on all: nothing ran, so they can go on without a graph."""
        found, error = None, None
        try:
            with self._group.recorded():
                found = self._backend.capture(run)
        except Exception as raised:
            error = raised
        failed, alike = self._failed(error, "a capture")
        if not alike:
            raise self._group.failed(f"a capture: {_UNLIKE}") from error
        if any(failed):
            found = None
            fault = self._group.any_fault(None if error is None else where(error), "the errors of a capture")
            raise RuntimeError(str(fault)) from error
        assert found is not None
        found[0].nbytes = max(held for (held,) in self._group.numbers([found[0].nbytes], "the memory of a graph"))
        return found

    def _failed(self, error: Exception | None, what: str) -> tuple[list[bool], bool]:
        """On which ranks it failed, and whether all have queued equally many collectives: else the next call's would
        pair with those of this one.
        """
        failed, queued = zip(*self._group.numbers([error is not None, self._group.queued()], what), strict=True)
        return [bool(each) for each in failed], len(set(queued)) == 1

    def capturing(self) -> bool:
        return self._backend.capturing()

    def turn(self) -> Any:
        return self._backend.turn()
