"""The logger "infuse", warnings that are logged too, and progress bars. The log goes where the user sends it, else
nowhere.

INFO has the stages of an injection, DEBUG the plan and each step of progress.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console

log = logging.getLogger("infuse")
log.addHandler(logging.NullHandler())  # else Python prints logged warnings a second time if logging is not set up


def warn(text: str, category: type[Warning] = UserWarning, *, stacklevel: int) -> None:
    """Warn and log. `stacklevel` is that of warnings.warn, counted from the caller."""
    log.warning(text)
    warnings.warn(text, category, stacklevel=stacklevel + 1)


@contextmanager
def progress_bars(wanted: bool | None) -> Iterator[Callable[[int, int, str], None]]:
    """A callback (done, total, what) that logs, and shows bars on standard error on rank 0.

    Bars are shown if `wanted`, or by default on a terminal or in a notebook.
    """
    from tqdm.auto import tqdm  # chooses its look when it is imported

    in_world = torch.distributed.is_available() and torch.distributed.is_initialized()
    console = Console(stderr=True)
    shown = console.is_terminal or console.is_jupyter if wanted is None else wanted
    if in_world and torch.distributed.get_rank() > 0:
        shown = False
    bars: dict[str, Any] = {}

    def progress(done: int, total: int, what: str) -> None:
        log.debug("%s: %d of %d", what, done, total)
        if shown:
            if what not in bars:
                bars[what] = tqdm(desc=what, total=total, leave=False)
            bars[what].update(done - bars[what].n)

    try:
        yield progress
    finally:
        for bar in bars.values():
            bar.close()
