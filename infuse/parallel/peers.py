"""The processes of a group's ranks: where each one runs, and which of them have ended."""

from __future__ import annotations

import json
import os
import platform
import select
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PROCESSES = Path("/proc/self/ns/pid")


@dataclass(frozen=True)
class Home:
    """Where a rank runs. Two ranks with the same `host` see each other's processes."""

    host: str
    pid: int
    processors: tuple[int, ...]  # those that it may run on

    @classmethod
    def here(cls) -> Home:
        """A host is its name, its boot and its namespace of processes: containers may share the first two."""
        boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
        processes = os.readlink(_PROCESSES) if _PROCESSES.exists() else ""
        cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        return cls(" ".join((platform.node(), boot, processes)), os.getpid(), tuple(sorted(cpus)))

    def packed(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def unpacked(cls, text: str) -> Home:
        found = json.loads(text)
        return cls(found["host"], found["pid"], tuple(found["processors"]))


class Peers:
    """The ranks of a group by their homes, in rank order."""

    def __init__(self, homes: Sequence[Home], rank: int):
        self.homes, self._rank = tuple(homes), rank
        self._descriptors: dict[int, int] = {}
        for other, home in enumerate(homes):
            if home.host == homes[rank].host and home.pid != homes[rank].pid:
                try:
                    self._descriptors[other] = os.pidfd_open(home.pid)
                except AttributeError:  # not Linux: what the transport says is all there is
                    break
                except OSError:  # it has ended already
                    self._descriptors[other] = -1
        weakref.finalize(self, _close, tuple(self._descriptors.values()))

    @property
    def on_one_host(self) -> bool:
        return len({home.host for home in self.homes}) == 1

    @property
    def each_has_a_processor(self) -> bool:
        """Whether all of them can run at once, where they are on one host."""
        return len({number for home in self.homes for number in home.processors}) >= len(self.homes)

    def ended(self) -> list[int]:
        """The ranks on this host whose processes have ended. A descriptor of a process is ready then, even while it is
        a zombie.
        """
        poll = select.poll()  # select.select refuses descriptors above 1023
        for descriptor in self._descriptors.values():
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(0)}
        return [rank for rank, descriptor in self._descriptors.items() if descriptor < 0 or descriptor in ready]


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)
