"""Collectives of ranks on one host through memory that all of them have mapped: kernels of
ops/cpu/src/binding_shared.cpp.

torch.distributed's own for CPUs, gloo, sends every tensor through sockets and threads of its own: tens of microseconds
at best.
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

from infuse import interrupts
from infuse.errors import RankError
from infuse.native import DTYPES, kernels
from infuse.parallel.distributed import gathered_shape
from infuse.parallel.peers import Peers
from infuse.parallel.waiting import Patience, names

FOLDER = Path("/dev/shm")
MOST_RANKS = 32  # kMostRanks in src/region.h
BUFFER_BYTES = 512 << 10  # two for each rank: beyond, tensors go in chunks; larger ones do not stay in the caches
SPIN_US = 50  # how long a rank that waits keeps its processor; a token's layers are less apart
SLICE_US = 100_000  # of waiting in C++, after which signals are handled and ended ranks noticed
HEARD_S = 1.0  # how long to wait for what a rank that differs says of itself
DONE, WAITING, DIFFERS = 0, 1, 2  # enum class Outcome in src/region.h
ABSENT, DIFFERENT = 1, 2  # of shared_states


def why_not(size: int) -> str | None:
    """Why this process cannot share memory with `size` ranks, None where it can."""
    found = kernels()
    if isinstance(found, str):
        return found
    if size > MOST_RANKS:
        return f"{size} ranks: at most {MOST_RANKS} share memory"
    return None if FOLDER.is_dir() else f"no {FOLDER}"


def new_region(size: int, spins: bool) -> tuple[Path, Tensor]:
    """A file for `size` ranks and its memory, which is there: OSError now, not a signal later, where there is not
    enough of it.
    """
    size_bytes = kernels().shared_bytes(size, BUFFER_BYTES)
    path = FOLDER / f"infuse-{os.getpid()}-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
        region = _mapped(descriptor)
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(descriptor)
    kernels().shared_begin(region, size, BUFFER_BYTES, SPIN_US if spins else 0)
    return path, region


def opened_region(path: Path) -> Tensor:
    """The memory of another rank's file."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        return _mapped(descriptor)
    finally:
        os.close(descriptor)


def _mapped(descriptor: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, os.fstat(descriptor).st_size), dtype=torch.uint8)


class SharedMemory:
    """The operations of the ranks that have mapped one region. Tensors are on the CPU and contiguous, `axis` is not
    negative.

    RankError after `timeout_s`, within a fraction of a second where a rank's process has ended, at once where ranks do
    different things.
    """

    name = "shared memory"

    def __init__(self, region: Tensor, rank: int, size: int, *, peers: Peers, timeout_s: float):
        self.rank, self.size = rank, size
        self._region, self._peers, self._timeout_s = region, peers, timeout_s
        found = kernels()
        self._sum, self._gather, self._broadcast = (
            found.shared_all_reduce.default,
            found.shared_all_gather.default,
            found.shared_broadcast.default,
        )
        self._tags: dict[str, int] = {}
        weakref.finalize(self, found.shared_leave, region, rank, "it has left the group")

    def all_reduce(self, x: Tensor, what: str) -> Tensor:
        """The sum over ranks, in place, added up in rank order; 16-bit types in float32, rounded once."""
        if x.dtype in DTYPES:
            self._run(self._sum, (x,), what)
            return x
        pieces = self.all_gather(x.unsqueeze(0), [1] * self.size, 0, what)
        return x.copy_(pieces.sum(dim=0))

    def all_gather(self, x: Tensor, sizes: Sequence[int], axis: int, what: str) -> Tensor:
        """All ranks' pieces along `axis`, of `sizes`."""
        whole = torch.empty(gathered_shape(x, sizes, axis), dtype=x.dtype)
        rows = torch.Size(x.shape[:axis]).numel()
        column_bytes = torch.Size(x.shape[axis + 1 :]).numel() * x.element_size()
        self._run(self._gather, (x, whole, [size * column_bytes for size in sizes], rows), what)
        return whole

    def broadcast(self, x: Tensor, what: str) -> Tensor:
        """Rank 0's values, in place."""
        self._run(self._broadcast, (x,), what)
        return x

    def _run(self, operation: Callable[..., int], args: tuple, what: str) -> None:
        tag = self._tags.get(what)
        if tag is None:
            tag = self._tags[what] = zlib.crc32(what.encode())
        outcome = operation(self._region, self.rank, *args, tag, SLICE_US)
        if outcome == DONE:
            return
        patience = Patience(self._timeout_s)
        try:
            while outcome == WAITING:
                interrupts.check()
                self._look_around(what, patience)
                outcome = operation(self._region, self.rank, *args, tag, SLICE_US)
        except BaseException as error:
            self._leave(f"{type(error).__name__}: {error}")
            raise
        if outcome == DIFFERS:
            self._leave(what)
            raise RankError(self._difference(what))

    def _look_around(self, what: str, patience: Patience) -> None:
        """RankError where waiting for those who have not come is in vain, or has lasted too long."""
        ended = self._peers.ended()  # before the states: who has come and then ended has come
        absent = [
            rank for rank, state in enumerate(kernels().shared_states(self._region, self.rank)) if state == ABSENT
        ]
        where = f"rank {self.rank} of {self.size}, {what}"
        if set(absent) & set(ended):
            raise RankError(f"{where}: the process of {names([rank for rank in ended if rank in absent])} has ended")
        for rank in absent:
            words = kernels().shared_last_words(self._region, rank)
            if words:
                raise RankError(f"{where}: rank {rank} takes part no more: {words}")
        if patience.is_over() and absent:
            raise RankError(
                f"{where}: {names(absent)} did not come within {self._timeout_s:g} s (the process runs, but is elsewhere)"
            )

    def _difference(self, what: str) -> str:
        """Which ranks do something else, and what; they say so when they see it themselves."""
        found = kernels()
        others = [rank for rank, state in enumerate(found.shared_states(self._region, self.rank)) if state == DIFFERENT]
        until = time.monotonic() + HEARD_S
        theirs = []
        for rank in others:
            while not (words := found.shared_last_words(self._region, rank)) and time.monotonic() < until:
                time.sleep(0.001)
            theirs.append(
                f"rank {rank} does {words or 'something else'} ({found.shared_operation(self._region, self.rank, rank)})"
            )
        mine = found.shared_operation(self._region, self.rank, self.rank)
        return f"rank {self.rank} of {self.size} does {what} ({mine}), but {'; '.join(theirs)}"

    def _leave(self, words: str) -> None:
        kernels().shared_leave(self._region, self.rank, words.encode()[:500].decode(errors="ignore"))
