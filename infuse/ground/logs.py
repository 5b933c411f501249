"""The logger "infuse", warnings that are also logged, and progress bars.

Nothing is printed unless the user configures logging. INFO reports the stages of an injection, DEBUG the plan and each
step of progress.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

log = logging.getLogger("infuse")
log.addHandler(logging.NullHandler())  # without it Python prints logged warnings twice if logging is not configured


def warn(text: str, category: type[Warning] = UserWarning, *, stacklevel: int) -> None:
    """Warn and log. `stacklevel` is as in warnings.warn, counted from the caller."""
    log.warning(text)
    warnings.warn(text, category, stacklevel=stacklevel + 1)


@contextmanager
def progress_bars(wanted: bool | None) -> Iterator[Callable[[int, int, str], None]]:
    """Yield a callback (done, total, what) that logs progress and shows bars on standard error on rank 0.

    Bars are shown if `wanted` is True, or if it is None and standard error is a terminal or a notebook.
    """
    from rich.console import Console
    from tqdm.auto import tqdm  # picks terminal or notebook bars at import

    in_world = torch.distributed.is_available() and torch.distributed.is_initialized()
    console = Console(stderr=True)
    shown = console.is_terminal or console.is_jupyter if wanted is None else wanted
    if in_world and torch.distributed.get_rank() > 0:
        shown = False
    bars: dict[str, Any] = {}

    def progress(done: int, total: int, what: str) -> None:
        log.debug("%s: %d of %d", what, done, total)
        nonlocal shown
        if shown:
            try:
                if what not in bars:
                    bars[what] = tqdm(desc=what, total=total, leave=False)
                bars[what].update(done - bars[what].n)
            except (OSError, ValueError) as error:  # standard error is closed, which must not stop a replacement
                shown = False
                log.debug("progress bars end: %s", error)

    try:
        yield progress
    finally:
        for bar in bars.values() if shown else ():
            bar.close()
