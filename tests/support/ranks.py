"""Several ranks for tests: a pool of worker processes that a whole session uses, forked from one that
has imported PyTorch.

`ranks.run(size, function, *args)` runs a function of a test module on ranks 0 .. size - 1, with torch.distributed
(gloo) set up.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.support import forked

MOST = 4
GLOO_TIMEOUT = timedelta(seconds=60)  # of the group itself; what is tested brings its own
GRACE_S = 60.0  # for the other ranks, once one has failed
PAUSE_S = 1.0  # of waiting: where more has passed, this process was paused, and so may have been the workers
START_S = 300.0  # for a worker to import torch on a busy machine


class RankFailed(AssertionError):
    """A function raised on some ranks: the text has each one's rank and traceback, `errors` the exceptions by rank."""

    def __init__(self, text: str, errors: dict[int, BaseException]):
        super().__init__(text)
        self.errors = errors


class RankDied(Exception):
    """The worker process ended before the function did."""


class RankHung(Exception):
    """The function was not over in time."""


@dataclass(frozen=True)
class Raised:
    """An exception on its way from a worker; `pickled` is None where it cannot be pickled."""

    text: str
    trace: str
    pickled: bytes | None

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)  # some can be written and not read
        except Exception:
            pickled = None
        return cls(f"{type(error).__name__}: {error}", traceback.format_exc(), pickled)

    def exception(self) -> BaseException:
        return pickle.loads(self.pickled) if self.pickled else RuntimeError(self.text)


@dataclass(frozen=True)
class Task:
    """One call on one rank. `store` is the file through which the ranks meet: a new one means a new group."""

    store: str
    rank: int
    size: int
    function: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Worker:
    process: BaseProcess
    pipe: Connection


class Ranks:
    """The pool. Workers start when that many are first needed; those that died or hung are replaced when they are next
    needed.
    """

    def __init__(self) -> None:
        self._workers: dict[int, Worker] = {}  # by rank
        self._folder = tempfile.TemporaryDirectory(prefix="infuse-ranks-")
        self._size = 0
        self._generation = 0

    def run(self, size: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
        """What `function(*args)` returns on each rank; RankFailed with tracebacks if one raises, dies or hangs."""
        results, traces = self._call(size, function, args, timeout)
        if traces:
            text = "\n".join(f"rank {rank} of {size}:\n{trace}" for rank, trace in sorted(traces.items()))
            raise RankFailed(text, {rank: results[rank] for rank in traces})
        return results

    def run_expecting_errors(
        self, size: int, function: Callable[..., Any], *args: Any, timeout: float = 120
    ) -> list[Any]:
        """Like run, but with the exception (also RankDied and RankHung) instead of the value of a rank that raised."""
        return self._call(size, function, args, timeout)[0]

    def close(self) -> None:
        """End the workers; the next call starts new ones."""
        self._end(list(self._workers))
        self._size = 0

    def _call(
        self, size: int, function: Callable[..., Any], args: tuple[Any, ...], timeout: float
    ) -> tuple[list[Any], dict[int, str]]:
        assert 1 <= size <= MOST, f"{size} ranks: between 1 and {MOST}"
        self._start(size)
        if size != self._size:
            self._generation, self._size = self._generation + 1, size
            for rank in set(self._workers) - set(range(size)):
                self._workers[rank].pipe.send_bytes(pickle.dumps(None))
        store = str(Path(self._folder.name, f"store-{self._generation}"))
        for rank in range(size):
            self._workers[rank].pipe.send_bytes(pickle.dumps(Task(store, rank, size, function, args)))
        results: list[Any] = [None] * size
        traces: dict[int, str] = {}
        for rank, answer in self._answers(size, timeout).items():
            results[rank] = answer.exception() if isinstance(answer, Raised) else answer
            if isinstance(answer, Raised):
                traces[rank] = answer.trace
        if traces:
            self._size = 0  # a group with a failed rank is of no use any more
        self._end([rank for rank, result in enumerate(results) if isinstance(result, (RankDied, RankHung))])
        return results, traces

    def _end(self, ranks: list[int]) -> None:
        ended = [self._workers.pop(rank) for rank in ranks]
        for worker in ended:
            worker.process.kill()
        for worker in ended:
            worker.process.join()
            worker.pipe.close()

    def _start(self, size: int) -> None:
        """Workers up to `size`, all at once."""
        fresh = {}
        for rank in set(range(size)) - set(self._workers):
            ours, theirs = Pipe()
            process = forked.start(work, theirs, str(Path(__file__).parents[2]))
            theirs.close()  # so that the end of the worker is the end of the pipe
            fresh[rank] = Worker(process, ours)
        self._workers |= fresh
        for worker in fresh.values():
            assert worker.pipe.poll(START_S), f"a worker did not start within {START_S} s"
            worker.pipe.recv_bytes()

    def _answers(self, size: int, timeout: float) -> dict[int, Any]:
        """Each rank's value, or what went wrong as Raised."""
        answers: dict[int, Any] = {}
        open_pipes = {worker.pipe: rank for rank, worker in self._workers.items() if rank < size}
        left = timeout
        while open_pipes and left > 0:
            began = time.monotonic()
            ready = wait(list(open_pipes), min(PAUSE_S, left))
            left -= min(PAUSE_S, time.monotonic() - began)
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = open_pipes.pop(pipe)
                answers[rank] = self._answer(rank)
                if isinstance(answers[rank], Raised):
                    left = min(left, GRACE_S)
        for rank in open_pipes.values():
            answers[rank] = _made(RankHung(f"rank {rank} was not done in time"))
        return answers

    def _answer(self, rank: int) -> Any:
        worker = self._workers[rank]
        try:
            return pickle.loads(worker.pipe.recv_bytes())
        except (EOFError, OSError):
            worker.process.join(10)
            return _made(RankDied(f"the process of rank {rank} ended with exit code {worker.process.exitcode}"))


def _made(error: Exception) -> Raised:
    return Raised(str(error), f"{type(error).__name__}: {error}\n", pickle.dumps(error))


def work(pipe: Connection, folder: str) -> None:
    """A worker: runs tasks until the pipe closes."""
    sys.path[:0] = [folder] if folder not in sys.path else []
    import torch

    import tests.conftest  # noqa: F401  no network, quiet libraries, one thread: as in the tests' own process

    torch.set_num_threads(1)
    pipe.send_bytes(b"ready")
    store = ""
    while True:
        try:
            task: Task | None = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        except BaseException as error:  # the test's module does not import here
            pipe.send_bytes(pickle.dumps(Raised.of(error)))
            continue
        if task is None:  # the others meet anew, and gloo waits, for what failed, until all have left the old group
            _part()
            store = ""
            continue
        try:
            if task.store != store:
                _meet(task)
                store = task.store
            torch.manual_seed(0)
            answer = pickle.dumps(task.function(*task.args))
        except BaseException as error:
            answer = pickle.dumps(Raised.of(error))
        pipe.send_bytes(answer)


def _part() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _meet(task: Task) -> None:
    import torch.distributed as dist

    _part()
    store = dist.FileStore(task.store, task.size)
    dist.init_process_group("gloo", store=store, rank=task.rank, world_size=task.size, timeout=GLOO_TIMEOUT)


@contextmanager
def deadlines_end_when_all_wait(waiting: Sequence[int], rank_that_gives_up: int | None = None) -> Iterator[None]:
    """Make collectives time out as soon as the ranks `waiting` wait (on one of them), however busy the machine is."""
    import pytest
    import torch.distributed as dist

    from infuse.ground import interrupts
    from infuse.parallel import distributed, shared_memory

    meeting, rank, check = dist.group.WORLD.get_group_store(), dist.get_rank(), interrupts.check
    gives_up = rank_that_gives_up in (None, rank)

    class Deadline:
        def __init__(self, limit_s: float):
            pass

        def is_over(self) -> bool:
            return gives_up and meeting.check([f"waits {other}" for other in waiting])

    def waits() -> None:
        meeting.set(f"waits {rank}", "")
        check()

    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(interrupts, "check", waits)  # every wait calls it
        monkey.setattr(distributed, "Deadline", Deadline)
        monkey.setattr(shared_memory, "Deadline", Deadline)
        yield


def same(values: Sequence[Any]) -> bool:
    """Whether all ranks have the first one's bits."""
    import torch

    return all(
        torch.equal(value, values[0]) if isinstance(value, torch.Tensor) else value == values[0] for value in values
    )
