"""Folders in which infuse keeps what later processes reuse: built kernels, receipts of proofs.

INFUSE_CACHE_DIR, else the user's cache folder, else (if home is read-only) one in the temporary folder.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def roots() -> list[Path]:
    """The folders in order of preference. They need not exist."""
    if folder := os.environ.get("INFUSE_CACHE_DIR"):
        return [Path(folder)]
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folders = [Path(home, "infuse")] if os.path.isabs(home) else []  # "~" stays where the user has no home
    return [*folders, _temporary()]


def is_trusted(root: Path) -> bool:
    """Whether what lies there may be used. Anybody could create our folder in the temporary folder."""
    if root != _temporary():
        return True
    try:
        status = root.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _temporary() -> Path:
    return Path(tempfile.gettempdir(), f"infuse-{os.getuid() if os.name == 'posix' else ''}")
