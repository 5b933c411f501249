"""The logger "infuse", and warnings that are logged too. The user decides where the log goes: nothing is shown by
itself.

INFO has the stages of an injection, DEBUG the plan and each step of progress.
"""

from __future__ import annotations

import logging
import warnings

log = logging.getLogger("infuse")
log.addHandler(logging.NullHandler())  # or Python would print logged warnings a second time where logging is not set up


def warn(text: str, category: type[Warning] = UserWarning, *, stacklevel: int) -> None:
    """Warn and log. `stacklevel` as of warnings.warn, seen from the caller."""
    log.warning(text)
    warnings.warn(text, category, stacklevel=stacklevel + 1)
