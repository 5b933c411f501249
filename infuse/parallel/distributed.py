"""Collectives of torch.distributed.

gloo aborts the process if ranks bring tensors of different sizes, and returns garbage if dtypes differ. So each
collective over gloo starts with a message of fixed size that says what it is; small tensors travel in that message.
NCCL's collectives run as they are: NCCL has its own watchdog, and a message before each would cost more than the
collective.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from infuse.ground import interrupts
from infuse.ground.errors import RankError
from infuse.parallel.liveness import Deadline, Heartbeat, Peers, names

SUM_BYTES = 4  # of the checksum that a message starts with
HEAD_BYTES = 256  # the checksum, and the collective in words
SMALL_BYTES = 8192  # tensors up to this size travel in the first message: one token's activations of most models
SLICE = timedelta(milliseconds=100)  # after each, handle signals and look for ended ranks
GONE_S = 0.5  # a process may end this long after its connections


def described(what: str, operation: str, dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Describe a collective in words, the same on all ranks."""
    return f"{what} ({operation} of {str(dtype)[6:]} {list(shape)})"


def gathered_shape(x: Tensor, sizes: Sequence[int], axis: int) -> list[int]:
    return [*x.shape[:axis], sum(sizes), *x.shape[axis + 1 :]]


class Distributed:
    """The collectives of one group of torch.distributed, for contiguous tensors on any device; `axis` is not negative.

    Raises RankError after `timeout_s`, or at once if a rank has ended or a connection breaks; the error names the
    missing ranks. Set `peers` as soon as the ranks have told each other where they run.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, timeout_s: float):
        self._group = process_group
        self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.peers: Peers | None = None
        self.timeout_s = timeout_s
        backends = str(dist.get_backend_config(process_group))  # "cpu:gloo,cuda:nccl"
        self.nccl = "nccl" in backends
        self.name = "nccl" if self.nccl else "gloo"
        self._gloo = "cpu:gloo" in backends
        # For small tensors of our own.
        self.device = torch.device("cpu")
        if self.nccl and not self._gloo:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._heartbeat = Heartbeat(process_group)
        self._number = 0  # of collectives so far
        self.queued = 0  # of those, how many the host did not wait for
        self._recording = False
        self._mine = torch.zeros(HEAD_BYTES + SMALL_BYTES, dtype=torch.uint8)
        self._all = torch.empty(self.size, HEAD_BYTES + SMALL_BYTES, dtype=torch.uint8)

    def all_reduce(self, x: Tensor, what: str) -> Tensor:
        """The sum over ranks, in place, the same bits on every rank. 16-bit types are added in float32."""
        if self.left_to_device(x):
            self._queue(lambda: dist.all_reduce(x, group=self._group), what)
            return x
        small = self._first(x.cpu(), described(what, "sum", x.dtype, x.shape), x.nbytes)
        wide = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
        if small is None:
            total = x.to("cpu", wide)
            self._wait(lambda: dist.all_reduce(total, group=self._group, async_op=True), what)
        else:
            total = self._piece(small, 0, x).to(wide)
            for rank in range(1, self.size):
                total = total + self._piece(small, rank, x)
        return x if total is x else x.copy_(total)

    def all_gather(self, x: Tensor, sizes: Sequence[int], axis: int, what: str, failure: str = "") -> Tensor:
        """All ranks' pieces along `axis`, of `sizes`. `failure` is told to ranks that are in another collective."""
        shapes = [[*x.shape[:axis], size, *x.shape[axis + 1 :]] for size in sizes]
        most_bytes = max(torch.Size(shape).numel() for shape in shapes) * x.element_size()
        if self.left_to_device(x):
            rows = self._gather_bytes(x, most_bytes, what)
        else:
            # With all sizes, so that ranks which disagree about them get an error.
            operation = f"gather on axis {axis} of pieces {list(sizes)}"
            text = described(what, operation, x.dtype, gathered_shape(x, sizes, axis))
            small = self._first(x.cpu(), text, most_bytes, failure)
            rows = self._gather_bytes(x.cpu(), most_bytes, what) if small is None else small
        pieces = []
        for row, shape in zip(rows, shapes, strict=True):
            pieces.append(row[: torch.Size(shape).numel() * x.element_size()].view(x.dtype).view(shape))
        return torch.cat(pieces, dim=axis).to(x.device)

    def broadcast(self, x: Tensor, what: str) -> Tensor:
        """Rank 0's values, in place."""
        root = 0 if self._group is None else dist.get_global_rank(self._group, 0)
        if self.left_to_device(x):
            self._queue(lambda: dist.broadcast(x, root, group=self._group), what)
            return x
        small = self._first(x.cpu(), described(what, "broadcast", x.dtype, x.shape), x.nbytes)
        if small is not None:
            return x.copy_(self._piece(small, 0, x))
        values = x.cpu()
        self._wait(lambda: dist.broadcast(values, root, group=self._group, async_op=True), what)
        return x if values is x else x.copy_(values)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Collectives inside are recorded and not run: they do not count, and their errors stay on this rank."""
        before = self._number, self.queued
        self._recording = True
        try:
            yield
        finally:
            self._recording = False
            self._number, self.queued = before

    def left_to_device(self, x: Tensor) -> bool:
        """Whether NCCL runs the collective, so that the host does not wait for it."""
        return self.nccl and (x.device.type == "cuda" or not self._gloo)

    def _piece(self, small: Tensor, rank: int, like: Tensor) -> Tensor:
        return small[rank, : like.nbytes].view(like.dtype).view(like.shape)

    def _gather_bytes(self, x: Tensor, most_bytes: int, what: str) -> Tensor:
        """The bytes of all ranks' tensors, uint8 [size, most_bytes]."""
        mine = torch.zeros(most_bytes, dtype=torch.uint8, device=x.device)
        mine[: x.nbytes].copy_(x.reshape(-1).view(torch.uint8))
        whole = torch.empty(self.size, most_bytes, dtype=torch.uint8, device=x.device)
        rows = list(whole.unbind())
        if self.left_to_device(x):  # the host does not wait, and must not wait inside a graph
            self._queue(lambda: dist.all_gather(rows, mine, group=self._group), what)
        else:
            self._wait(lambda: dist.all_gather(rows, mine, group=self._group, async_op=True), what)
        return whole

    def _first(self, x: Tensor, text: str, most_bytes: int, failure: str = "") -> Tensor | None:
        """Tell all ranks which collective this one starts, and send x (on the CPU) along if it is small on all ranks.

        Returns the payloads of all ranks, uint8 [size, SMALL_BYTES], or None if x is not small. Raises RankError if
        ranks are in different collectives.
        """
        words = failure or f"runs {text}"
        head = zlib.crc32(text.encode()).to_bytes(SUM_BYTES, "little")
        head += words.encode()[: HEAD_BYTES - SUM_BYTES].ljust(HEAD_BYTES - SUM_BYTES, b"\0")
        self._mine[:HEAD_BYTES] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        if most_bytes <= SMALL_BYTES:
            self._mine[HEAD_BYTES : HEAD_BYTES + x.nbytes] = x.reshape(-1).view(torch.uint8)
        rows = list(self._all.unbind())
        self._wait(lambda: dist.all_gather(rows, self._mine, group=self._group, async_op=True), text)
        theirs = []
        for rank, row in enumerate(rows):
            message = bytes(row[:HEAD_BYTES].numpy())
            if message[:SUM_BYTES] != head[:SUM_BYTES]:
                theirs.append(f"rank {rank} {message[SUM_BYTES:].rstrip(bytes(1)).decode(errors='replace')}")
        if theirs:
            raise RankError(f"rank {self.rank} of {self.size} runs {text}, but {'; '.join(theirs)}")
        return self._all[:, HEAD_BYTES:] if most_bytes <= SMALL_BYTES else None

    def _queue(self, start: Callable[[], Any], what: str) -> None:
        """Start a collective that the device waits for."""
        self._number += 1
        self.queued += 1
        try:
            start()
        except RuntimeError as error:
            if self._recording:
                raise
            raise RankError(f"rank {self.rank} of {self.size}, {what}: {self._reason(error, what)}") from error

    def _wait(self, start: Callable[[], Any], what: str) -> None:
        """Run a collective, and wait for it in slices."""
        self._number += 1
        self._heartbeat.start()
        where = f"rank {self.rank} of {self.size}, {what}"
        deadline = Deadline(self.timeout_s)
        try:
            work = start()
            while not _is_over(work):
                interrupts.check()
                ended = self.peers.ended() if self.peers else []
                if ended:
                    raise RankError(f"{where}: the process of {names(ended)} has ended")
                gave_up = self._heartbeat.beat(self._number, what)
                if gave_up is not None or deadline.is_over():
                    raise RankError(f"{where}: {self._absent(what, gave_up)}")
            work.wait()
        except RuntimeError as error:
            raise RankError(f"{where}: {self._reason(error, what)}") from error

    def _absent(self, what: str, gave_up: int | None) -> str:
        """Name the ranks that did not come in time; `gave_up` is the rank that stopped waiting first."""
        absent, waiting = self._heartbeat.give_up(self._number, what)
        limit = f"within {self.timeout_s:g} s" if gave_up is None else f"before rank {gave_up} gave up"
        if self._heartbeat.store_failure:
            return f"not all ranks came {limit}; which ones is unknown: {self._heartbeat.store_failure}"
        if absent:
            return f"{names(absent)} did not come {limit}; {waiting}"
        return f"all ranks came, but it did not end {limit}; {waiting}"

    def _reason(self, error: RuntimeError, what: str) -> str:
        """Explain an error of the backend by ended processes or the other ranks' heartbeats."""
        text = str(error).strip().partition("\n")[0]
        until = time.monotonic() + GONE_S
        while self.peers and time.monotonic() < until:
            ended = self.peers.ended()
            if ended:
                return f"the process of {names(ended)} has ended ({text})"
            time.sleep(0.02)
        absent, waiting = self._heartbeat.give_up(self._number, what)
        if self._heartbeat.store_failure:
            return f"a rank or its connection is gone ({text}); {self._heartbeat.store_failure}"
        if absent:
            return f"{names(absent)} {'is' if len(absent) == 1 else 'are'} gone or elsewhere ({text}); {waiting}"
        return f"a connection between ranks is gone ({text}); {waiting}"


def _is_over(work: Any) -> bool:
    """Wait for one slice."""
    with suppress(RuntimeError):  # the slice is over, or the collective has failed
        work.wait(SLICE)
    return bool(work.is_completed())
