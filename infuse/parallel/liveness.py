"""Track the ranks of a group: which processes have ended, and where the other ranks wait.

torch.distributed.monitored_barrier is no substitute: it names the absent on rank 0 alone, and blames ranks that are
late.
"""

from __future__ import annotations

import json
import os
import platform
import select
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

SUSPENDED_S = 1.0  # a longer gap between two looks at the clock means that this process was suspended
BEAT_S = 1.0  # between two heartbeats of a rank that waits
LOOK_S = 2.5  # how long to look for the others' heartbeats
SLICE_S = 0.05  # between two looks
ANSWER_S = 5.0  # how long the store may take to answer
GAVE_UP = -1  # the beat of a rank's last note

T = TypeVar("T")


def names(ranks: Sequence[int]) -> str:
    """ "rank 1", "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class Deadline:
    """A time limit. Time while the process was suspended counts as at most one second."""

    def __init__(self, limit_s: float):
        self._left_s, self._last = limit_s, time.monotonic()

    def is_over(self) -> bool:
        """Call this repeatedly while waiting."""
        now = time.monotonic()
        self._left_s -= min(now - self._last, SUSPENDED_S)
        self._last = now
        return self._left_s < 0


@dataclass(frozen=True)
class Home:
    """Where a rank runs. Ranks with the same `host` see each other's processes."""

    host: str
    pid: int
    processors: list[int]  # that the process may run on

    @classmethod
    def here(cls) -> Home:
        # Containers may share a host's name and boot id; then their process namespaces differ.
        boot, processes = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
        boot_id = boot.read_text().strip() if boot.exists() else ""
        namespace = os.readlink(processes) if processes.exists() else ""
        cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        return cls(" ".join((platform.node(), boot_id, namespace)), os.getpid(), sorted(cpus))


class Peers:
    """The processes of a group's ranks, by their homes in rank order."""

    def __init__(self, homes: Sequence[Home], rank: int):
        self._homes = tuple(homes)
        self._descriptors: dict[int, int] = {}  # by rank; -1 if the process has already ended
        for other, home in enumerate(homes):
            if home.host == homes[rank].host and home.pid != homes[rank].pid:
                try:
                    self._descriptors[other] = os.pidfd_open(home.pid)
                except AttributeError:  # not Linux: only the transport can tell
                    break
                except OSError:
                    self._descriptors[other] = -1
        for descriptor in self._descriptors.values():
            if descriptor >= 0:
                weakref.finalize(self, os.close, descriptor)

    @property
    def on_one_host(self) -> bool:
        return len({home.host for home in self._homes}) == 1

    @property
    def each_has_a_processor(self) -> bool:
        """Whether all ranks of one host can run at once."""
        return len({number for home in self._homes for number in home.processors}) >= len(self._homes)

    def ended(self) -> list[int]:
        """The ranks on this host whose processes have ended."""
        poll = select.poll()  # select.select refuses descriptors above 1023
        for descriptor in self._descriptors.values():
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN)  # ready when the process has ended, even as a zombie
        ready = {descriptor for descriptor, _ in poll.poll(0)}
        return [rank for rank, descriptor in self._descriptors.items() if descriptor < 0 or descriptor in ready]


@dataclass(frozen=True)
class Note:
    """What a waiting rank writes: a counter, and the number and name of its operation."""

    beat: int
    number: int
    what: str


class Heartbeat:
    """Tells the other ranks, through the store of torch.distributed, in which operation this rank waits.

    A wait of less than BEAT_S writes nothing. Operations have the same `number` on all ranks.
    """

    def __init__(self, process_group: dist.ProcessGroup | None):
        self.store_failure = ""  # why the store cannot be reached
        self._beat, self._next = 0, 0.0
        group: Any = process_group or dist.group.WORLD
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._store: dist.Store = group.get_group_store()
        self._keeper = keeper_of(self._store, dist.get_process_group_ranks(group))
        # All ranks create the same groups in the same order: the count tells the groups of one store apart.
        count = self._ask(lambda: self._store.add(f"infuse/groups/{self._rank}", 1))
        self._store = dist.PrefixStore(f"infuse/{count}", self._store)

    def start(self) -> None:
        """A wait begins."""
        self._next = time.monotonic() + BEAT_S

    def beat(self, number: int, what: str) -> int | None:
        """Call this repeatedly while waiting. Returns the first rank that gave up, if any has."""
        if time.monotonic() < self._next:
            return None
        self._beat += 1
        gave_up = self._ask(lambda: self._write(Note(self._beat, number, what)))
        self._next = time.monotonic() + BEAT_S
        return gave_up

    def give_up(self, number: int, what: str) -> tuple[list[int], str]:
        """Stop waiting. Return the ranks that are not waiting, and a text that says where the others wait.

        Both are empty if `store_failure` is set.
        """
        first = self._ask(lambda: self._write(Note(GAVE_UP, number, what)))
        before = self._ask(self._read) or {}
        until, others = time.monotonic() + LOOK_S, [rank for rank in range(self._size) if rank != self._rank]
        there: dict[int, Note] = {}
        while (now := self._ask(self._read)) is not None:
            # A rank that waits writes again within BEAT_S.
            there = {rank: note for rank, note in now.items() if note.beat == GAVE_UP or note != before.get(rank)}
            if len(there) == len(others) or time.monotonic() > until:
                break
            time.sleep(SLICE_S)
        if self.store_failure:
            return [], ""
        here = sorted([self._rank, *(rank for rank, note in there.items() if note.number == number)])
        waiting = [f"{names(here)} wait{'s' if len(here) == 1 else ''}"]
        waiting += [f"rank {rank} waits in {there[rank].what}" for rank in sorted(there) if rank not in here]
        if first is not None:
            waiting.append(f"rank {first} gave up first")
        return [rank for rank in others if rank not in there], "; ".join(waiting)

    def _write(self, note: Note) -> int | None:
        """Write this rank's note. Returns the first rank that gave up."""
        self._store.set(str(self._rank), json.dumps(vars(note)))
        if self._store.check(["gave up"]):
            return int(self._store.get("gave up"))
        if note.beat == GAVE_UP:
            self._store.set("gave up", str(self._rank))
        return None

    def _read(self) -> dict[int, Note]:
        """The other ranks' notes."""
        written = [rank for rank in range(self._size) if rank != self._rank and self._store.check([str(rank)])]
        return {rank: Note(**json.loads(self._store.get(str(rank)))) for rank in written}

    def _ask(self, question: Callable[[], T]) -> T | None:
        """Return the store's answer, or None and set `store_failure`. A thread asks, because the store may block."""
        answers: list[T] = []
        errors: list[str] = []

        def asked() -> None:
            try:
                answers.append(question())
            except Exception as error:
                errors.append(str(error).strip().partition("\n")[0] or type(error).__name__)

        if self.store_failure:
            return None
        thread, deadline = threading.Thread(target=asked, daemon=True), Deadline(ANSWER_S)
        thread.start()
        while thread.is_alive() and not deadline.is_over():
            thread.join(SUSPENDED_S / 2)
        if answers:
            return answers[0]
        reason = errors[0] if errors else f"no answer within {ANSWER_S:g} s"
        self.store_failure = f"{self._keeper} ({reason})"
        return None


def keeper_of(store: Any, ranks: Sequence[int]) -> str:
    """Name the process that keeps `store`, for an error; `ranks` are the group's ranks in the world."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return f"the {type(store).__name__} of torch.distributed cannot be reached"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        keeper = "torchrun"
    elif 0 in ranks:
        keeper = f"rank {ranks.index(0)}"
    else:
        keeper = "rank 0 of the world"
    return f"{keeper}, which keeps the store of torch.distributed at {store.host}:{store.port}, is gone or out of reach"
