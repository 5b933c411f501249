"""What a rank knows while it waits for others: how long it has waited, and where the others wait.

A rank whose wait lasts writes where it is into the store of torch.distributed, once a second; one that gives up reads
what the others write, and names those who do not, on any host. A short wait touches no store.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

PAUSE_S = 1.0  # between two looks at the clock: what lasts longer was a pause of this process
BEAT_S = 1.0  # between two notes of a rank that waits
LOOK_S = 2.5  # how long a rank that gives up looks for the others' notes
SLICE_S = 0.05  # between two looks
ANSWER_S = 5.0  # how long the store may take
GAVE_UP = -1  # in the place of a note's beat: it is the last one

T = TypeVar("T")


def names(ranks: Sequence[int]) -> str:
    """ "rank 1", "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class Patience:
    """The time that is left to wait. Of a pause, in which this process did not run, a second counts: others may have
    paused with it.
    """

    def __init__(self, limit_s: float):
        self._left_s, self._last = limit_s, time.monotonic()

    def is_over(self) -> bool:
        """To be asked again and again while waiting."""
        now = time.monotonic()
        self._left_s -= min(now - self._last, PAUSE_S)
        self._last = now
        return self._left_s < 0


class RollCall:
    """Where each rank of a group waits: in operation `number`, which is the same on all of them, and `what` that is in
    words.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, rank: int, size: int):
        self.rank, self.size = rank, size
        self.lost = ""  # why the store cannot be asked
        self._keeper, self._beat, self._next = "the store of torch.distributed", 0, 0.0
        self._store: dist.Store | None = None
        self._ask(lambda: self._open(process_group))

    def begins(self) -> None:
        """A wait begins."""
        self._next = time.monotonic() + BEAT_S

    def goes_on(self, number: int, what: str) -> int | None:
        """A wait goes on: to be called again and again; it writes once in BEAT_S. The rank that has given up, None
        where none has.
        """
        if time.monotonic() < self._next:
            return None
        self._beat += 1
        gave_up = self._ask(partial(self._write, [self._beat, number, what]))
        self._next = time.monotonic() + BEAT_S
        return gave_up

    def result(self, number: int, what: str) -> tuple[list[int], str]:
        """This rank gives up: the ranks that wait nowhere, and in words where the others do. Where `lost` says why,
        nothing is known.

        Who waits writes again within a second, and who has given up has written that.
        """
        first = self._ask(partial(self._write, [GAVE_UP, number, what]))
        before, now, there = self._ask(self._read) or {}, {}, set()
        until = time.monotonic() + LOOK_S
        others = [rank for rank in range(self.size) if rank != self.rank]
        while not self.lost:
            now = self._ask(self._read) or {}
            there = {rank for rank, note in now.items() if note[0] == GAVE_UP or note != before.get(rank)}
            if len(there) == len(others) or time.monotonic() > until:
                break
            time.sleep(SLICE_S)
        if self.lost:
            return [], ""
        here = sorted([self.rank, *(rank for rank in there if now[rank][1] == number)])
        said = [f"{names(here)} wait{'s' if len(here) == 1 else ''}"]
        said += [f"rank {rank} waits in {now[rank][2]}" for rank in sorted(there) if rank not in here]
        said += [f"rank {first} had given up"] if first is not None else []
        return [rank for rank in others if rank not in there], "; ".join(said)

    def _write(self, note: list[Any]) -> int | None:
        """Write this rank's note; the first rank that has given up."""
        assert self._store is not None
        self._store.set(str(self.rank), json.dumps(note))
        if self._store.check(["gave up"]):
            return int(self._store.get("gave up"))
        if note[0] == GAVE_UP:
            self._store.set("gave up", str(self.rank))
        return None

    def _read(self) -> dict[int, list[Any]]:
        """The others' notes: [beat, number, what]."""
        store = self._store
        assert store is not None
        written = [rank for rank in range(self.size) if rank != self.rank and store.check([str(rank)])]
        return {rank: json.loads(store.get(str(rank))) for rank in written}

    def _open(self, process_group: dist.ProcessGroup | None) -> None:
        group: Any = process_group or dist.group.WORLD
        store = group.get_group_store()
        self._keeper = _keeper(store, dist.get_process_group_ranks(group))
        number = store.add(
            f"infuse/groups/{self.rank}", 1
        )  # all ranks make the same groups: notes of another one are not this one's
        self._store = dist.PrefixStore(f"infuse/{number}", store)

    def _ask(self, question: Callable[[], T]) -> T | None:
        """The store's answer. A store that is gone may keep who asks waiting for minutes: in a thread that can be left
        alone.
        """
        answers: list[T] = []
        errors: list[str] = []

        def asked() -> None:
            try:
                answers.append(question())
            except Exception as error:  # whatever a store says that has none to answer
                errors.append(str(error).strip().partition("\n")[0] or type(error).__name__)

        if self.lost:
            return None
        thread, patience = threading.Thread(target=asked, daemon=True), Patience(ANSWER_S)
        thread.start()
        while thread.is_alive() and not patience.is_over():
            thread.join(PAUSE_S / 2)
        if not answers:
            reason = errors[0] if errors else f"no answer within {ANSWER_S:g} s"
            self.lost = f"{self._keeper} cannot be asked ({reason})"
        return answers[0] if answers else None


def _keeper(store: Any, ranks: Sequence[int]) -> str:
    """Who keeps the store, which ranks have met through, in words for an error; `ranks` are the group's in the world."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return f"the {type(store).__name__} of torch.distributed"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        who = "torchrun"
    else:
        who = f"rank {ranks.index(0)}" if 0 in ranks else "rank 0 of the world"
    return (
        f"{who}, which keeps the store of torch.distributed at {store.host}:{store.port}, is gone or out of reach: it"
    )
