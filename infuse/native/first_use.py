"""Build the kernels at first use if the installation has none, and keep them for later processes.

They are kept in the cache folder. If several processes start together, one builds and the others wait.
INFUSE_BUILD=0 disables building.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from infuse.ground import logs
from infuse.ground.cache_folder import is_trusted, roots
from infuse.native import build

LIBRARY, FAILURE = "_kernels.so", "failure.txt"
LONGEST_BUILD_S = 1800.0  # how long to wait for another process; measured 90 s on two shared cores


def kept() -> Path | None:
    """Return the library that an earlier process built from these sources; None if there is none."""
    folders = [root / f"kernels-{build.fingerprint()}" for root in roots() if is_trusted(root)]
    return next((folder / LIBRARY for folder in folders if (folder / LIBRARY).is_file()), None)


def outlook() -> str:
    """Describe what the next use of the kernels will do if none are kept: build them, or fail, and why."""
    if why := build.why_not(_torch()):
        return f"the C++ kernels are not built: {why}"
    for root in roots():
        if why := _remembered(root / f"kernels-{build.fingerprint()}"):
            return why
    command = " ".join(build.compiler() or [])
    return f"not built yet: {command} builds them at first use, in about half a minute; `infuse build` does it now"


def obtain(*, again: bool = False) -> Path | str:
    """Return the library, building it if needed, or the reason why there is none. `again`: rebuild in any case."""
    if not again and (library := kept()):
        return library
    if why := build.why_not(_torch()):
        return f"the C++ kernels are not built: {why}"
    problems = []
    for root in roots():
        try:
            return _built(root, again)
        except (OSError, NotImplementedError) as error:  # NotImplementedError: the file system has no locks
            problems.append(f"{root}: {error}")
    tried = "; ".join(problems)
    return f"the C++ kernels are not built: no folder to keep them in ({tried}); INFUSE_CACHE_DIR names another"


def _built(root: Path, again: bool) -> Path | str:
    """Build the library below `root`, or wait for the process that does. Raise OSError if it cannot be kept there."""
    folder = root / f"kernels-{build.fingerprint()}"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_trusted(root):
        raise PermissionError("other users may write there")
    folder.mkdir(exist_ok=True)
    started = time.time()
    with _locked(folder / "lock"):
        library = folder / LIBRARY
        if library.is_file() and (not again or library.stat().st_mtime > started):
            return library
        if not again and (why := _remembered(folder)):
            return why
        for stale in folder.glob("build-*"):  # left by a process that was killed
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as objects:
            _say("building the C++ kernels for CPUs, once for this installation: about half a minute ...")
            try:
                build.compile_kernels(Path(objects, LIBRARY), Path(objects), _torch())
            except build.BuildError as error:
                return _failed(folder, str(error))
            os.replace(Path(objects, LIBRARY), library)
        (folder / FAILURE).unlink(missing_ok=True)
        _say(f"the C++ kernels were built in {time.time() - started:.0f} s and are kept in {folder}")
        return library


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of the folder; report once if another process holds it."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=1.0)
    except Timeout:
        _say("waiting for another process that builds the C++ kernels ...")
        try:
            lock.acquire(timeout=LONGEST_BUILD_S)
        except Timeout as error:
            raise OSError(f"another process has been building for {LONGEST_BUILD_S:.0f} s") from error
    try:
        yield
    finally:
        lock.release()


def _failed(folder: Path, output: str) -> str:
    """Warn about a failed build and record it: later processes do not retry with the same compiler and PyTorch."""
    (folder / FAILURE).write_text(f"{_tools()}\n{output}\n", encoding="utf-8")
    last_lines = "\n".join(output.splitlines()[-12:])
    what = f"the C++ kernels could not be built, so PyTorch's own operations run. {last_lines}"
    then = "Another compiler or PyTorch, or `infuse build`, tries again."
    logs.warn(f"infuse: {what}\nThe full output is in {folder / FAILURE}. {then}", stacklevel=2)
    return _reason(folder)


def _remembered(folder: Path) -> str | None:
    """Return the reason if a build with this compiler and PyTorch has failed before."""
    try:
        tools = (folder / FAILURE).read_text(encoding="utf-8").partition("\n")[0]
    except OSError:
        return None
    return _reason(folder) if tools == _tools() else None


def _reason(folder: Path) -> str:
    return f"the C++ kernels could not be built ({folder / FAILURE}); `infuse build` tries again"


def _tools() -> str:
    """The compiler and PyTorch that a build depends on, in one line."""
    command = build.compiler() or []
    version = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout.partition("\n")[0]
    return f"{' '.join(command)}: {version}; torch {torch.__version__}"


def _torch() -> Path:
    return Path(torch.__file__).parent


def _say(text: str) -> None:
    """Report progress on standard error, on rank 0 only."""
    logs.log.info(text)
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"infuse: {text}\n")
        sys.stderr.flush()
