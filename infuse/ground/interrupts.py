"""Delay Ctrl-C while a model is being changed, until the model is restored or complete.

Python can raise KeyboardInterrupt between any two instructions of the main thread, even inside `finally`, so no `try`
can undo a change reliably. Other threads are never interrupted.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class _Held:
    """SIGINT handler that records the signal for `before`, the previous handler."""

    def __init__(self, before: Callable[[int, FrameType | None], Any]):
        self.before, self.pending, self.told = before, False, False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.pending = True

    def deliver(self) -> None:
        """Call the previous handler if a signal arrived. Python's default handler raises KeyboardInterrupt."""
        if self.pending:
            self.pending = False
            self.before(signal.SIGINT, sys._getframe())


@contextmanager
def held_back() -> Iterator[None]:
    """Delay SIGINT inside the `with`. It is delivered at the end, or by `check`."""
    before = signal.getsignal(signal.SIGINT)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or not callable(before) or isinstance(before, _Held):
        yield
        return
    handler = _Held(before)
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        handler.deliver()


def check() -> None:
    """Deliver a delayed SIGINT. Call this at points at which the change can be undone."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Held) and threading.current_thread() is threading.main_thread():
        handler.deliver()


def tell(what: str) -> None:
    """If a SIGINT is pending, log once that `what`, which cannot be undone, is completed first."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Held) and handler.pending and not handler.told:
        handler.told = True
        logging.getLogger("infuse").warning(
            "interrupted; %s, which is completed first (SIGTERM ends the process at once)", what
        )
