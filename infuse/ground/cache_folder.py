"""Folders in which infuse keeps what later processes reuse: built kernels, receipts of proofs, readings of layers.

INFUSE_CACHE_DIR, else the user's cache folder, else (if home is read-only) one in the temporary folder.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MOST = 2048  # files in a folder; the oldest go first
_ID_LENGTH = 12
_SUFFIX = ".kept"


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


def are_used() -> bool:
    """Whether receipts and readings of earlier processes count: INFUSE_RECEIPTS=0 neither reads nor writes any."""
    return os.environ.get("INFUSE_RECEIPTS") != "0"


def id_of(identity: str) -> str:
    """The name of the file that is kept for an identity of 64 hexadecimal digits."""
    return identity[:_ID_LENGTH]


@dataclass(frozen=True)
class Folder:
    """Small files by identity in one folder of the cache. A file that was changed, cut or is another's is none."""

    name: str

    def read(self, identity: str) -> bytes | None:
        """Return the content written for an identity; None if there is none, or it is not whole."""
        for folder in self._places():
            with suppress(OSError):
                found = (folder / f"{id_of(identity)}{_SUFFIX}").read_bytes()
                content = found.partition(b"\n")[2]
                if found == _file(identity, content):
                    return content
        return None

    def write(self, identity: str, content: bytes) -> None:
        """Write to the first folder that takes it. What cannot be written is found out again."""
        for root in roots():
            folder = root / self.name
            with suppress(OSError):
                root.mkdir(mode=0o700, parents=True, exist_ok=True)
                if not is_trusted(root):
                    continue
                folder.mkdir(exist_ok=True)
                with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as file:
                    file.write(_file(identity, content))
                os.replace(file.name, folder / f"{id_of(identity)}{_SUFFIX}")
                _keep_newest(folder)
                return

    def count(self) -> int:
        return sum(1 for _ in self._files())

    def clear(self) -> int:
        """Remove all files; return how many."""
        files = list(self._files())
        for file in files:
            file.unlink(missing_ok=True)
        return len(files)

    def _files(self) -> Iterator[Path]:
        for folder in self._places():
            yield from folder.glob(f"*{_SUFFIX}")

    def _places(self) -> list[Path]:
        return [root / self.name for root in roots() if is_trusted(root)]


RECEIPTS, READINGS = Folder("receipts"), Folder("readings")


def _file(identity: str, content: bytes) -> bytes:
    """The content below the identity and a sum of both."""
    whole = hashlib.sha256(identity.encode() + content).hexdigest()
    return f"{identity} {whole}\n".encode() + content


def _keep_newest(folder: Path) -> None:
    files = list(folder.iterdir())  # also parts of files that killed processes left
    if len(files) > MOST:
        files.sort(key=lambda file: file.stat().st_mtime)
        for file in files[: len(files) - MOST]:
            file.unlink(missing_ok=True)
