"""Collectives of ranks on one host through memory that all of them map: kernels of ops/cpu/src/binding_shared.cpp.

gloo sends every tensor through sockets and its own threads: tens of microseconds at best.
"""

from __future__ import annotations

import mmap
import os
import secrets
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from infuse.ground import interrupts
from infuse.ground.errors import RankError
from infuse.native import DTYPES, kernels, text_of
from infuse.parallel.distributed import described, gathered_shape
from infuse.parallel.liveness import Deadline, Peers, names

FOLDER = Path("/dev/shm")
MOST_RANKS = 32  # kMostRanks in src/region.h
BUFFER_BYTES = 512 << 10  # two for each rank; larger tensors go in chunks, larger chunks would not stay in the caches
SPIN_US = 50  # how long a waiting rank keeps its processor; the layers of one token are closer than that
SLICE_US = 100_000  # of waiting in C++; after each, handle signals and look for ended ranks
REASON_S = 1.0  # how long to wait until a rank in another collective has said which
DONE, WAITING, DIFFERS = 0, 1, 2  # enum class Outcome in src/region.h
ABSENT, DIFFERENT = 1, 2  # of shared_states


def why_not(size: int) -> str | None:
    """Return why this process cannot share memory with `size` ranks; None if it can."""
    library = kernels()
    if isinstance(library, str):
        return library
    if size > MOST_RANKS:
        return f"{size} ranks: at most {MOST_RANKS} can share memory"
    return None if FOLDER.is_dir() else f"no {FOLDER}"


def new_region(size: int, spins: bool) -> tuple[Path, Tensor]:
    """Create a file for `size` ranks and map it. Raises OSError if there is not enough memory."""
    size_bytes = kernels().shared_bytes(size, BUFFER_BYTES)
    path = FOLDER / f"infuse-{os.getpid()}-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)  # without it, a lack of memory would be a SIGBUS later
        region = _mapped(descriptor)
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(descriptor)
    kernels().shared_begin(region, size, BUFFER_BYTES, SPIN_US if spins else 0)
    return path, region


def opened_region(path: Path) -> Tensor:
    """Map another rank's file."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        return _mapped(descriptor)
    finally:
        os.close(descriptor)


def _mapped(descriptor: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, os.fstat(descriptor).st_size), dtype=torch.uint8)


class SharedMemory:
    """The collectives of ranks that map one region, for contiguous tensors on the CPU; `axis` is not negative.

    Raises RankError after `timeout_s`, within a fraction of a second if a rank's process has ended, and at once if
    ranks are in different collectives.
    """

    name = "shared memory"

    def __init__(self, region: Tensor, rank: int, size: int, *, peers: Peers, timeout_s: float):
        self.rank, self.size = rank, size
        self._region, self._peers, self.timeout_s = region, peers, timeout_s
        library = kernels()
        self._sum, self._gather = library.shared_all_reduce.default, library.shared_all_gather.default
        self._broadcast = library.shared_broadcast.default
        self._tags: dict[str, int] = {}
        weakref.finalize(self, library.shared_leave, region, rank, list(b"it dropped the group"))

    def all_reduce(self, x: Tensor, what: str) -> Tensor:
        """The sum over ranks, in place, added in rank order; 16-bit types are added in float32 and rounded once."""
        if x.dtype in DTYPES:
            self._run(self._sum, (x,), what, x)
            return x
        pieces = self.all_gather(x.unsqueeze(0), [1] * self.size, 0, what)
        return x.copy_(pieces.sum(dim=0))

    def all_gather(self, x: Tensor, sizes: Sequence[int], axis: int, what: str, failure: str = "") -> Tensor:
        """All ranks' pieces along `axis`, of `sizes`. `failure` is told to ranks that are in another collective."""
        whole = torch.empty(gathered_shape(x, sizes, axis), dtype=x.dtype)
        rows = torch.Size(x.shape[:axis]).numel()
        column_bytes = torch.Size(x.shape[axis + 1 :]).numel() * x.element_size()
        self._run(self._gather, (x, whole, [size * column_bytes for size in sizes], rows), what, whole, failure)
        return whole

    def broadcast(self, x: Tensor, what: str) -> Tensor:
        """Rank 0's values, in place."""
        self._run(self._broadcast, (x,), what, x)
        return x

    def _run(self, operation: Callable[..., int], args: tuple, what: str, result: Tensor, failure: str = "") -> None:
        tag = self._tags.get(what)
        if tag is None:
            tag = self._tags[what] = zlib.crc32(what.encode())
        outcome = operation(self._region, self.rank, *args, tag, SLICE_US)
        if outcome == DONE:
            return
        deadline = Deadline(self.timeout_s)
        try:
            while outcome == WAITING:
                interrupts.check()
                self._check_others(what, deadline)
                outcome = operation(self._region, self.rank, *args, tag, SLICE_US)
        except BaseException as error:
            self._leave(f"{type(error).__name__}: {error}")
            raise
        if outcome == DIFFERS:
            kind = {self._sum: "sum", self._gather: "gather"}.get(operation, "broadcast")
            runs = f"runs {described(what, kind, result.dtype, result.shape)}"
            self._leave(failure or runs)
            raise RankError(f"rank {self.rank} of {self.size} {runs}, but {self._others_words()}")

    def _check_others(self, what: str, deadline: Deadline) -> None:
        """Raise RankError if a missing rank has ended or left the group, or the deadline is over."""
        library, where = kernels(), f"rank {self.rank} of {self.size}, {what}"
        ended = self._peers.ended()  # before the states: a rank may come and then end
        absent = [rank for rank, state in enumerate(library.shared_states(self._region, self.rank)) if state == ABSENT]
        gone = [rank for rank in ended if rank in absent]
        if gone:
            raise RankError(f"{where}: the process of {names(gone)} has ended")
        for rank in absent:
            if reason := self._last_words(rank):
                raise RankError(f"{where}: rank {rank} left the group: {reason}")
        if absent and deadline.is_over():
            raise RankError(f"{where}: {names(absent)} did not come within {self.timeout_s:g} s, though still running")

    def _others_words(self) -> str:
        """Ask each rank in another collective which one it runs. A rank answers once it sees the difference itself."""
        library, until, theirs = kernels(), time.monotonic() + REASON_S, []
        for rank, state in enumerate(library.shared_states(self._region, self.rank)):
            if state == DIFFERENT:
                while not (words := self._last_words(rank)) and time.monotonic() < until:
                    time.sleep(0.001)
                theirs.append(f"rank {rank} {words or 'runs something else'}")
        return "; ".join(theirs)

    def _leave(self, reason: str) -> None:
        whole = reason.encode()[:500].decode(errors="ignore")  # no part of a character
        kernels().shared_leave(self._region, self.rank, list(whole.encode()))

    def _last_words(self, rank: int) -> str:
        return text_of(kernels().shared_last_words(self._region, rank))
