"""Collectives of torch.distributed, guarded: gloo aborts the process where ranks bring tensors of different sizes, and
adds up garbage where dtypes differ. So every operation starts with one message of fixed size that says what it is;
small tensors travel in it.

NCCL's operations run as they are: it watches over itself, and a message before each would cost more than the operation.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from infuse import interrupts
from infuse.errors import RankError
from infuse.parallel.peers import Peers
from infuse.parallel.waiting import Patience, RollCall, names

HEAD_BYTES = 256  # what the operation is, as text, and the checksum of all of it
SMALL_BYTES = 8192  # of a tensor that travels in the first message: a token's activations of most models
SLICE = timedelta(milliseconds=100)  # of waiting, after which signals are handled and ended ranks noticed
GONE_S = 0.5  # how long after its connections a process may end


def described(what: str, operation: str, dtype: torch.dtype, shape: Sequence[int]) -> str:
    """An operation in words: what all ranks must agree on."""
    return f"{what} ({operation} of {str(dtype)[6:]} {list(shape)})"


def gathered_shape(x: Tensor, sizes: Sequence[int], axis: int) -> list[int]:
    return [*x.shape[:axis], sum(sizes), *x.shape[axis + 1 :]]


class Distributed:
    """The operations of one group of torch.distributed. Tensors may be anywhere; x is contiguous, `axis` is not
    negative.

    `peers` is None until the ranks have told each other where they run. RankError after `timeout_s`, at once where a
    rank has ended or a connection breaks; it names the ranks that are not there.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, timeout_s: float):
        self._group = process_group
        self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.peers: Peers | None = None
        self._timeout_s = timeout_s
        backends = str(dist.get_backend_config(process_group))  # "cpu:gloo,cuda:nccl"
        self.nccl = "nccl" in backends
        self.name = "nccl" if self.nccl else "gloo"
        self._gloo = "cpu:gloo" in backends
        # Where small tensors of our own must be.
        self.device = (
            torch.device("cpu") if self._gloo or not self.nccl else torch.device("cuda", torch.cuda.current_device())
        )
        self._roll_call = RollCall(process_group, self.rank, self.size)
        self._number = 0  # of operations
        self.queued = 0  # those among them that were not waited for
        self._recording = False
        self._mine = torch.zeros(HEAD_BYTES + SMALL_BYTES, dtype=torch.uint8)
        self._all = torch.empty(self.size, HEAD_BYTES + SMALL_BYTES, dtype=torch.uint8)

    def all_reduce(self, x: Tensor, what: str) -> Tensor:
        """The sum over ranks, in place. 16-bit types are added up in float32, in rank order or gloo's, the same bits
        everywhere.
        """
        if self._is_plain(x):
            self._plain(lambda: dist.all_reduce(x, group=self._group), what)
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

    def all_gather(self, x: Tensor, sizes: Sequence[int], axis: int, what: str) -> Tensor:
        """All ranks' pieces along `axis`, of `sizes`."""
        shapes = [[*x.shape[:axis], size, *x.shape[axis + 1 :]] for size in sizes]
        most_bytes = max(torch.Size(shape).numel() for shape in shapes) * x.element_size()
        if self._is_plain(x):
            small = None
        else:
            # All sizes, so that a disagreement about them is one about the operation.
            text = described(
                what, f"gather on axis {axis} of pieces {list(sizes)}", x.dtype, gathered_shape(x, sizes, axis)
            )
            small = self._first(x.cpu(), text, most_bytes)
        if small is None:
            device = x.device if self._is_plain(x) else torch.device("cpu")
            padded = torch.zeros(most_bytes, dtype=torch.uint8, device=device)
            padded[: x.nbytes].copy_(x.reshape(-1).view(torch.uint8))
            small = torch.empty(self.size, most_bytes, dtype=torch.uint8, device=device)
            pieces = list(small.unbind())
            if self._is_plain(x):  # the host does not wait, and must not inside a graph
                self._plain(lambda: dist.all_gather(pieces, padded, group=self._group), what)
            else:
                self._wait(lambda: dist.all_gather(pieces, padded, group=self._group, async_op=True), what)
        found = [
            small[r, : torch.Size(s).numel() * x.element_size()].view(x.dtype).view(s) for r, s in enumerate(shapes)
        ]
        return torch.cat(found, dim=axis).to(x.device)

    def broadcast(self, x: Tensor, what: str) -> Tensor:
        """Rank 0's values, in place."""
        root = 0 if self._group is None else dist.get_global_rank(self._group, 0)
        if self._is_plain(x):
            self._plain(lambda: dist.broadcast(x, root, group=self._group), what)
            return x
        small = self._first(x.cpu(), described(what, "broadcast", x.dtype, x.shape), x.nbytes)
        if small is not None:
            return x.copy_(self._piece(small, 0, x))
        values = x.cpu()
        self._wait(lambda: dist.broadcast(values, root, group=self._group, async_op=True), what)
        return x if values is x else x.copy_(values)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Operations inside are recorded and not run: they do not count, and of one that fails nobody is told."""
        before = self._number, self.queued
        self._recording = True
        try:
            yield
        finally:
            self._recording = False
            self._number, self.queued = before

    def _is_plain(self, x: Tensor) -> bool:
        return self.nccl and (x.device.type == "cuda" or not self._gloo)

    def _piece(self, small: Tensor, rank: int, like: Tensor) -> Tensor:
        return small[rank, : like.nbytes].view(like.dtype).view(like.shape)

    def _first(self, x: Tensor, text: str, most_bytes: int) -> Tensor | None:
        """Say to all ranks what this one is about to do, and send x, on the CPU, along where it is small on all ranks.

        Returns the payloads of all ranks, uint8 [size, SMALL_BYTES], or None where x is not small; RankError where
        ranks disagree.
        """
        written = text.encode()
        head = written[: HEAD_BYTES - 4].ljust(HEAD_BYTES - 4, b"\0") + zlib.crc32(written).to_bytes(4, "little")
        self._mine[:HEAD_BYTES] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        if most_bytes <= SMALL_BYTES:
            self._mine[HEAD_BYTES : HEAD_BYTES + x.nbytes] = x.reshape(-1).view(torch.uint8)
        rows = list(self._all.unbind())
        self._wait(lambda: dist.all_gather(rows, self._mine, group=self._group, async_op=True), text)
        heads = [bytes(row[:HEAD_BYTES].numpy()) for row in rows]
        others = [rank for rank in range(self.size) if heads[rank] != head]
        if others:
            theirs = "; ".join(
                f"rank {rank} does {heads[rank][:-4].rstrip(bytes(1)).decode(errors='replace')}" for rank in others
            )
            raise RankError(f"rank {self.rank} of {self.size} does {text}, but {theirs}")
        return self._all[:, HEAD_BYTES:] if most_bytes <= SMALL_BYTES else None

    def _plain(self, operation: Callable[[], Any], what: str) -> None:
        """Queue an operation that the device waits for."""
        self._number += 1
        self.queued += 1
        try:
            operation()
        except RuntimeError as error:
            if self._recording:
                raise
            raise RankError(f"rank {self.rank} of {self.size}, {what}: {self._why(error, what)}") from error

    def _wait(self, start: Callable[[], Any], what: str) -> None:
        """Start an operation and wait for its end, in slices."""
        self._number += 1
        self._roll_call.begins()
        where = f"rank {self.rank} of {self.size}, {what}"
        patience = Patience(self._timeout_s)
        try:
            work = start()
        except RuntimeError as error:
            raise RankError(f"{where}: {self._why(error, what)}") from error
        while True:
            try:
                work.wait(SLICE)
                return
            except RuntimeError:  # the slice is over, or the operation has failed
                if work.is_completed():
                    break
            interrupts.check()
            ended = self.peers.ended() if self.peers else []
            if ended:
                raise RankError(f"{where}: the process of {names(ended)} has ended")
            gave_up = self._roll_call.goes_on(self._number, what)
            if gave_up is not None or patience.is_over():
                raise RankError(f"{where}: {self._who_did_not_come(what, gave_up)}")
        try:
            work.wait()
        except RuntimeError as error:
            raise RankError(f"{where}: {self._why(error, what)}") from error

    def _who_did_not_come(self, what: str, gave_up: int | None) -> str:
        absent, others = self._roll_call.result(self._number, what)
        limit = f"within {self._timeout_s:g} s" if gave_up is None else f"before rank {gave_up} gave up"
        if self._roll_call.lost:
            return f"not all ranks came {limit}; who did not is unknown: {self._roll_call.lost}"
        return (
            f"{names(absent)} did not come {limit}; {others}"
            if absent
            else f"all ranks came, but it was not over {limit}; {others}"
        )

    def _why(self, error: RuntimeError, what: str) -> str:
        """What an error of the backend means, where the processes or the other ranks' notes say it, and its first line."""
        text = str(error).strip().partition("\n")[0]
        until = time.monotonic() + GONE_S
        while self.peers and time.monotonic() < until:
            ended = self.peers.ended()
            if ended:
                return f"the process of {names(ended)} has ended ({text})"
            time.sleep(0.02)
        absent, others = self._roll_call.result(self._number, what)
        if self._roll_call.lost:
            return f"a rank is gone, or the connection to it is ({text}); {self._roll_call.lost}"
        gone = "a connection between ranks is gone"
        if absent:
            gone = f"{names(absent)} {'is' if len(absent) == 1 else 'are'} gone or elsewhere"
        return f"{gone} ({text}); {others}"
