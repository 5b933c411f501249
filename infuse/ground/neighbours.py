"""Say that other processes used the cores while a model was loaded, which a user can do something about.

PyTorch's threads wait for each other by computing. A thread that has to share its core is late, and all others burn
their time waiting for it: a start then takes several times as long, and nothing else says why.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from infuse.ground.logs import warn

LEAST_SHARE = 0.2  # of a start; alone it is 0.01, beside one busy process on two cores 0.3
LEAST_SECONDS = 1.0
_SCHEDULER = "/proc/thread-self/schedstat"  # of Linux: nanoseconds that the thread ran and waited for a core, and turns


@contextmanager
def noticed(ranks: int) -> Iterator[None]:
    """Warn at the end of a `with` whose thread waited for a core for a fifth of the time, and for a second in all.

    With several `ranks` nothing is said: they slow each other.
    """
    waited, begun = waited_seconds(), time.perf_counter()
    yield
    seconds, waited = time.perf_counter() - begun, waited_seconds() - waited
    if ranks == 1 and waited >= LEAST_SECONDS and waited >= LEAST_SHARE * seconds:
        with suppress(UserWarning):  # a filter that makes errors of warnings is not to end a start that is complete
            warn(f"infuse: {lost(waited, seconds)}; {advice()} (docs/performance.md)", stacklevel=5)


def lost(waited: float, seconds: float) -> str:
    return f"other processes used the cores: for {waited:.1f} of {seconds:.1f} s this start waited for its turn"


def advice() -> str:
    """The next thing that a user can do about busy neighbours."""
    if os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive":
        return "a start loses less time with OMP_WAIT_POLICY=passive in the environment, before PyTorch is imported"
    return "give PyTorch as many threads as cores are left, by torch.set_num_threads"


def waited_seconds() -> float:
    """Seconds that the calling thread has been ready to run while others had its core; 0 where no system tells."""
    try:
        with open(_SCHEDULER) as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
