"""Group: the ranks that hold a model together, and the collectives that all of them run in the same order.

If a rank is gone, does not come or runs another collective, the others get a RankError and never hang; from then on
every collective of the group raises.
"""

from __future__ import annotations

import json
import pickle
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from infuse.ground.errors import (
    CheckpointError,
    ConfigError,
    InfuseError,
    NotAvailable,
    OutOfMemory,
    ProofError,
    RankError,
)
from infuse.parallel.distributed import Distributed
from infuse.parallel.liveness import Home, Peers, names
from infuse.parallel.shared_memory import SharedMemory, new_region, opened_region, why_not

T = TypeVar("T")
Combine = Callable[[Tensor], Tensor]  # a rank's part of a result → the whole

# The errors that `on_all_or_none` raises on all ranks if one raised them; for any other the rest raise RankError.
_RAISED_ON_ALL = {kind.__name__: kind for kind in (CheckpointError, ConfigError, NotAvailable, OutOfMemory, ProofError)}


class Group:
    """The ranks that hold a model. `what` names a collective in errors: "all-reduce of model.layers.3.self_attn".

    Every rank runs the same collectives in the same order with the same `what`, dtypes and shapes. Copies of a model
    share its group, which cannot be pickled if it has several ranks.
    """

    def __init__(self, distributed: Distributed | None, shared: SharedMemory | None = None, why_not_shared: str = ""):
        self.rank, self.size = (distributed.rank, distributed.size) if distributed else (0, 1)
        self.why_not_shared = why_not_shared  # why there is no shared memory
        self.distributed, self.shared = distributed, shared
        # Makes `dense`, which refers to this group: holding it here would keep a dropped group alive.
        self.make_dense: Callable[[Group], Group] | None = None
        self._failure = ""  # why the group failed
        # Calls of the model take turns: ranks run collectives in one order, whichever threads call.
        self._turn, self._thread, self._threads_met = threading.RLock(), threading.local(), False
        self._device = torch.device("cpu")  # for small tensors of our own
        if distributed is not None and shared is None:
            self._device = distributed.device

    @property
    def dense(self) -> Group:
        """The ranks that slice the layers without experts."""
        return self if self.make_dense is None else self.make_dense(self)

    def all_reduce(self, x: Tensor, what: str) -> Tensor:
        """The sum over ranks, the same bits on every rank: in x itself if it is contiguous, else in a new tensor.

        On CPUs bfloat16 and float16 are added in float32 and rounded once.
        """
        if self.size == 1:
            return x
        return self._run(lambda: self._transport(x).all_reduce(x.contiguous(), what), what)

    def all_gather(self, x: Tensor, sizes: Sequence[int], axis: int, what: str) -> Tensor:
        """All ranks' pieces in rank order along `axis`, where they have `sizes`; other axes are alike on all ranks."""
        axis %= x.dim()
        assert len(sizes) == self.size and x.size(axis) == sizes[self.rank], (x.shape, sizes, self.rank, axis)
        if self.size == 1:
            return x
        return self._run(lambda: self._transport(x).all_gather(x.contiguous(), sizes, axis, what), what)

    def adds(self, what: str) -> Combine:
        """Return `all_reduce` for the row-parallel product `what`."""
        return partial(self.all_reduce, what=what)

    def joins(self, widths: Sequence[int], what: str) -> Combine:
        """Return `all_gather` along the last axis for the column-parallel product `what`; `widths` by rank."""
        return partial(self.all_gather, sizes=widths, axis=-1, what=what)

    def broadcast(self, x: Tensor, what: str) -> Tensor:
        """Rank 0's values, in x itself if contiguous, else in a new tensor. All ranks have the same shape and dtype."""
        if self.size == 1:
            return x
        return self._run(lambda: self._transport(x).broadcast(x.contiguous(), what), what)

    def broadcast_object(self, value: T, what: str) -> T:
        """Rank 0's value, which is pickled; the others' values are ignored."""
        if self.size == 1:
            return value
        sent = pickle.dumps(value) if self.rank == 0 else b""
        length = self.broadcast(torch.tensor([len(sent)], device=self._device), what)
        payload = torch.zeros(int(length), dtype=torch.uint8, device=self._device)
        if self.rank == 0:
            payload.copy_(_bytes(sent))
        received = self.broadcast(payload, what)
        return value if self.rank == 0 else pickle.loads(received.cpu().numpy().tobytes())

    def barrier(self, what: str) -> None:
        """Wait until all ranks are here."""
        self.all_reduce(torch.zeros(1, device=self._device), what)

    def numbers(self, mine: Sequence[int], what: str) -> list[list[int]]:
        """Each rank's numbers; all ranks have as many."""
        row = torch.tensor([list(mine)], dtype=torch.long, device=self._device)
        return self.all_gather(row, [1] * self.size, 0, what).tolist()

    def check_same(self, values: Mapping[str, int | str], what: str, extra: Sequence[int] = ()) -> list[list[int]]:
        """Raise RankError, naming the first difference, if a rank's `values` (by checksum) differ from rank 0's.

        This is one exchange, `what`. The `extra` numbers travel along; return each rank's.
        """
        mine = [zlib.crc32(value.encode()) if isinstance(value, str) else value for value in values.values()]
        rows = self.numbers([*mine, *extra], what)
        for number, name in enumerate(values):
            others = [rank for rank, row in enumerate(rows) if row[number] != rows[0][number]]
            if others:
                difference = f"{names(others)} {'differs' if len(others) == 1 else 'differ'} from rank 0"
                order = ", in the same order: several threads call the model here" if self._threads_met else ""
                raise RankError(
                    f"rank {self.rank} of {self.size}: {name}: {difference}; give all ranks the same{order}"
                )
        return [row[len(mine) :] for row in rows]

    # -- calls from several threads

    @contextmanager
    def call(self) -> Iterator[None]:
        """Run the body, a call of the model, when no other thread's call runs."""
        if self.size > 1:
            self._take_turn()
        try:
            yield
        finally:
            if self.size > 1:
                self._turn.release()

    def begin_forward(self) -> None:
        """Like `call`, for a call that ends in `end_forward`, if its hooks run."""
        self.end_forward()  # of a call that was interrupted, whose hooks did not run
        self._take_turn()
        self._thread.in_forward = True

    def end_forward(self) -> None:
        if getattr(self._thread, "in_forward", False):
            self._thread.in_forward = False
            self._turn.release()

    def _take_turn(self) -> None:
        if not self._turn.acquire(blocking=False):
            self._threads_met = True
            self._turn.acquire()

    # -- failures

    def any_fault(self, fault: str | None, what: str) -> str | None:
        """Join all ranks' faults in one text, the same on each: "rank 1: no such file". None if no rank has one."""
        if self.size == 1:
            return fault
        failure = "" if fault is None else f"failed in {what}: {fault}"
        faults = self._texts("" if fault is None else f"rank {self.rank}: {fault}", what, failure)
        return "; ".join(filter(None, faults)) or None

    @contextmanager
    def on_all_or_none(self, what: str) -> Iterator[None]:
        """Run the body on all ranks or on none: if it raises on one, the others raise an error of the same class.

        Ranks that wait in a collective inside of the body get a RankError there, and the group has failed.
        """
        try:
            yield
        except BaseException as error:  # an interrupt too
            if not self._failure:
                with suppress(RankError):  # the others are inside of the body, and now know
                    self.any_fault(f"{type(error).__name__}: {error}", what)
            raise
        fault = self.any_fault(None, what)
        if fault is not None:
            kind: type[InfuseError] = _RAISED_ON_ALL.get(fault.split(": ")[1], RankError)
            raise kind(f"{what} failed on {fault}")

    def abort(self, why: str) -> bool:
        """Abort the collective that the other ranks wait in with RankError. True if all ranks abort for one reason.

        Ranks that wait for NCCL on the device are not notified.
        """
        if self.size == 1 or self._failure:
            return self.size == 1
        if self._device.type != "cpu":
            self._failure = why
            return False
        # Ranks that have queued different numbers of collectives must not go on.
        after = f", after collective {self.queued()} on the device" if self.queued() else ""
        try:
            self.barrier(f"abort: {why}{after}")
        except RankError:
            return False
        return True

    def failed(self, why: str) -> RankError:
        """Mark the group as failed, because the ranks are in different places. Returns the error to raise."""
        self._failure = why
        return RankError(f"rank {self.rank} of {self.size}, {why}")

    # -- graphs

    def why_not_captured(self, device: torch.device) -> str:
        """Return why a graph cannot hold collectives on that device's tensors; empty if it can."""
        if self.distributed is None:
            return ""
        if not self.distributed.nccl or device.type != "cuda":
            return f"the ranks add up by {self.describe()}, which waits on the host; NCCL can be captured"
        if self._device.type != "cpu":
            return 'the ranks have NCCL alone, and need gloo to agree on captures; "cpu:gloo,cuda:nccl" has both'
        return ""

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Collectives inside are recorded and not run; an error in them does not fail the group."""
        before = self._failure
        try:
            with self.distributed.recorded() if self.distributed else nullcontext():
                yield
        finally:
            self._failure = before

    def queued(self) -> int:
        """Number of collectives queued on the device so far; ranks with different counts are in different places."""
        return self.distributed.queued if self.distributed else 0

    def share_random_state(self) -> None:
        """Copy rank 0's random state to all ranks: the CPU's and, if rank 0 has used it, the current CUDA device's."""
        if self.size == 1:
            return
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        states = self.broadcast_object((torch.get_rng_state(), cuda), "broadcast of the random state")
        torch.set_rng_state(states[0])
        if states[1] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(states[1])

    def describe(self) -> str:
        """How tensors travel: "one rank", "shared memory", "gloo" or "nccl"."""
        if self.distributed is None:
            return "one rank"
        if self.shared is None or self.distributed.nccl:
            return self.distributed.name
        return self.shared.name

    def _transport(self, x: Tensor) -> Distributed | SharedMemory:
        if self.shared is not None and x.device.type == "cpu":
            return self.shared
        assert self.distributed is not None
        return self.distributed

    def _texts(self, text: str, what: str, failure: str = "") -> list[str]:
        """Each rank's text. `failure` is told to ranks that are in another collective."""
        mine, ones = _bytes(text.encode()).to(self._device), [1] * self.size
        length = torch.tensor([len(mine)], device=self._device)
        gathered = self._run(lambda: self._transport(length).all_gather(length, ones, 0, what, failure), what)
        lengths = gathered.tolist()
        joined = self.all_gather(mine, lengths, 0, what) if any(lengths) else mine
        return [piece.numpy().tobytes().decode() for piece in joined.cpu().split(lengths)]

    def _run(self, collective: Callable[[], Tensor], what: str) -> Tensor:
        if self._failure:
            raise RankError(
                f"rank {self.rank} of {self.size}, {what}: the process group failed earlier: {self._failure}"
            )
        try:
            return collective()
        except BaseException as error:  # after an interrupt too the ranks are in different places
            self._failure = str(error) if isinstance(error, RankError) else f"{type(error).__name__}: {error}"
            raise

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self

    def __copy__(self) -> Group:
        return self

    def __reduce__(self) -> Any:
        if self.size == 1:
            return "LOCAL"
        raise TypeError(
            f"a model that {self.size} ranks share cannot be pickled: rank {self.rank} holds a part of it, and the "
            "group belongs to its process. Save our shards (save_mp_checkpoint_path=FOLDER) and call "
            "init_inference(checkpoint=FOLDER) in the other process"
        )


LOCAL = Group(None)


def make_group(
    process_group: dist.ProcessGroup | None = None, *, timeout_s: float, shared_memory: bool = True
) -> Group:
    """The group of a torch.distributed group, or of the default one. All its ranks call this together.

    Every collective ends within `timeout_s`, by RankError if ranks do not come. One rank gets LOCAL. Tensors on CPUs
    travel through shared memory if all ranks are on one host and have the kernels, unless `shared_memory` is False on
    any of them.
    """
    if dist.get_world_size(process_group) == 1:
        return LOCAL
    distributed = Distributed(process_group, timeout_s)
    group = Group(distributed)
    homes = [Home(**json.loads(text)) for text in group._texts(json.dumps(vars(Home.here())), "exchange of hosts")]
    distributed.peers = peers = Peers(homes, group.rank)
    reason = group.any_fault("it is switched off" if not shared_memory else why_not(group.size), "exchange of kernels")
    if reason is None and not peers.on_one_host:
        reason = "the ranks are on several hosts"
    if reason:
        return Group(distributed, why_not_shared=reason)
    return _with_shared_memory(group, distributed, peers, timeout_s)


def _with_shared_memory(group: Group, distributed: Distributed, peers: Peers, timeout_s: float) -> Group:
    """Make the group with memory that rank 0 creates and all map, or without it on failure. Leaves no file behind."""
    path, region, fault = None, None, None
    try:
        if group.rank == 0:
            try:
                path, region = new_region(group.size, spins=peers.each_has_a_processor)
            except OSError as error:
                fault = f"no shared memory: {error}"
        name = group.broadcast_object(None if path is None else str(path), "exchange of shared memory")
        if group.rank and name is not None:
            try:
                region = opened_region(Path(name))
            except OSError as error:
                fault = f"no shared memory: {error}"
        fault = group.any_fault(fault, "mapping of shared memory")
    finally:
        if path is not None:
            path.unlink(missing_ok=True)
    if fault or region is None:
        return Group(distributed, why_not_shared=fault or "no shared memory")
    return Group(distributed, SharedMemory(region, group.rank, group.size, peers=peers, timeout_s=timeout_s))


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
