"""Group: the ranks that share each layer, and the operations in which all of them take part, in the same order.

A rank that is gone, does not come or does something else is a RankError on the others, never a hang; then the group is
broken for good.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from infuse.errors import RankError
from infuse.parallel.distributed import Distributed
from infuse.parallel.peers import Home, Peers
from infuse.parallel.shared_memory import SharedMemory, new_region, opened_region, why_not
from infuse.parallel.waiting import names

SHOWN = 200  # characters of a value in the text of an error

T = TypeVar("T")


class Transport(Protocol):
    """How tensors travel. x is contiguous, `axis` is not negative; errors are RankErrors that name rank, operation and
    what happened.
    """

    name: str

    def all_reduce(self, x: Tensor, what: str) -> Tensor: ...
    def all_gather(self, x: Tensor, sizes: Sequence[int], axis: int, what: str) -> Tensor: ...
    def broadcast(self, x: Tensor, what: str) -> Tensor: ...


class Group:
    """The ranks that share each layer. `what` names an operation in errors: "all-reduce of model.layers.3.self_attn".

    Every rank calls the same operations in the same order with the same `what`, dtypes and shapes. The group is no part
    of a model's state: copies share it, and it cannot be pickled where there are several ranks.
    """

    def __init__(self, distributed: Distributed | None, shared: Transport | None = None, why_not_shared: str = ""):
        self.rank, self.size = (distributed.rank, distributed.size) if distributed else (0, 1)
        self.why_not_shared = why_not_shared  # shared memory; empty where it is used
        self._distributed, self._shared = distributed, shared
        self._broken = ""

    def all_reduce(self, x: Tensor, what: str) -> Tensor:
        """The sum over ranks: x itself where it is contiguous, a new tensor elsewhere. Every rank gets the same bits.

        On CPUs bfloat16 and float16 are added up in float32 and rounded once.
        """
        if self.size == 1:
            return x
        return self._run(lambda: self._transport(x).all_reduce(x.contiguous(), what), what)

    def all_gather(self, x: Tensor, sizes: Sequence[int], axis: int, what: str) -> Tensor:
        """All ranks' pieces in rank order along `axis`; `sizes` are theirs on that axis, the other axes are the same on
        all ranks.
        """
        axis %= x.dim()
        assert len(sizes) == self.size and x.size(axis) == sizes[self.rank], (
            f"{tuple(x.shape)} for {sizes}[{self.rank}] on axis {axis}"
        )
        if self.size == 1:
            return x
        return self._run(lambda: self._transport(x).all_gather(x.contiguous(), sizes, axis, what), what)

    def broadcast(self, x: Tensor, what: str) -> Tensor:
        """Rank 0's values: in x itself where it is contiguous, in a new tensor elsewhere. x has the same shape and
        dtype on all ranks.
        """
        if self.size == 1:
            return x
        return self._run(lambda: self._transport(x).broadcast(x.contiguous(), what), what)

    def broadcast_object(self, value: T, what: str) -> T:
        """Rank 0's value, which can be pickled; the others' are not looked at."""
        if self.size == 1:
            return value
        sent = pickle.dumps(value) if self.rank == 0 else b""
        length = self.broadcast(torch.tensor([len(sent)], device=self._device), f"{what} (size)")
        payload = torch.zeros(int(length), dtype=torch.uint8, device=self._device)
        if self.rank == 0:
            payload.copy_(_bytes(sent))
        received = self.broadcast(payload, what)
        return value if self.rank == 0 else pickle.loads(received.cpu().numpy().tobytes())

    def agree(self, value: str, what: str) -> None:
        """RankError that names the ranks whose value is not rank 0's."""
        values = self._texts(value, what)
        others = [rank for rank in range(self.size) if values[rank] != values[0]]
        if others:
            theirs = "; ".join(f"rank {rank} has {_shortened(values[rank], values[0])}" for rank in others)
            self._broken = f"{what}: {names(others)} {'differ' if len(others) > 1 else 'differs'} from rank 0"
            raise RankError(
                f"rank {self.rank} of {self.size}, {self._broken}: "
                f"rank 0 has {_shortened(values[0], values[others[0]])}; {theirs}"
            )

    def any_fault(self, fault: str | None, what: str) -> str | None:
        """The faults of all ranks in one text, the same everywhere: "rank 1: no such file". None where no rank has one."""
        if self.size == 1:
            return fault
        faults = self._texts("" if fault is None else f"rank {self.rank}: {fault}", what)
        return "; ".join(filter(None, faults)) or None

    def numbers(self, mine: Sequence[int], what: str) -> list[list[int]]:
        """Each rank's numbers, as many as here."""
        gathered = self.all_gather(
            torch.tensor([list(mine)], dtype=torch.long, device=self._device), [1] * self.size, 0, what
        )
        return [list(row) for row in gathered.tolist()]

    def why_not_captured(self, device: torch.device) -> str:
        """Why operations on that device's tensors cannot be part of a graph; empty where they can: NCCL's are asked of
        the device.
        """
        if self._distributed is None:
            return ""
        if not self._distributed.nccl or device.type != "cuda":
            return f"the ranks add up by {self.describe()}, which waits on the host; NCCL can be captured"
        if self._device.type != "cpu":
            return 'the ranks have NCCL alone, and what they say of a capture must not go through it; "cpu:gloo,cuda:nccl" has both'
        return ""

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Operations inside are recorded and not run: after an error all ranks are where they were."""
        before = self._broken
        try:
            with self._distributed.recorded() if self._distributed else nullcontext():
                yield
        finally:
            self._broken = before

    def queued(self) -> int:
        """How many operations were left to the device so far: ranks that counted others are at different places."""
        return self._distributed.queued if self._distributed else 0

    def give_up(self, why: str) -> bool:
        """Say in the operation that the others are in that this rank does not go on: their RankError. True where all
        give up alike.

        Only messages on the host are guarded so. A rank whose others wait in an operation of NCCL's on the device is
        not heard there.
        """
        if self.size == 1 or self._broken:
            return self.size == 1
        if self._device.type != "cpu":
            self._broken = why
            return False
        try:
            self.barrier(
                f"given up: {why}{f', after operation {self.queued()} on the device' if self.queued() else ''}"
            )
        except RankError:
            return False
        return True

    def lost(self, why: str) -> RankError:
        """The error to raise where the ranks are at different places from now on."""
        self._broken = why
        return RankError(f"rank {self.rank} of {self.size}, {why}")

    def barrier(self, what: str) -> None:
        """Return when all ranks are here."""
        self.all_reduce(torch.zeros(1, device=self._device), what)

    def share_random_state(self) -> None:
        """Give all ranks rank 0's generators, of the CPU and of the current CUDA device where rank 0 has used it."""
        if self.size == 1:
            return
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        states = self.broadcast_object((torch.get_rng_state(), cuda), "broadcast of the random state")
        torch.set_rng_state(states[0])
        if states[1] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(states[1])

    def describe(self) -> str:
        """How tensors travel: "shared memory", "gloo", "nccl"; "one rank" where they do not."""
        if self._distributed is None:
            return "one rank"
        return self._distributed.name if self._distributed.nccl or self._shared is None else self._shared.name

    @property
    def _device(self) -> torch.device:
        return (
            torch.device("cpu") if self._shared is not None or self._distributed is None else self._distributed.device
        )

    def _transport(self, x: Tensor) -> Transport:
        if self._shared is not None and x.device.type == "cpu":
            return self._shared
        assert self._distributed is not None
        return self._distributed

    def _texts(self, text: str, what: str) -> list[str]:
        """Each rank's text."""
        mine = text.encode()
        lengths = self.all_gather(
            torch.tensor([len(mine)], device=self._device), [1] * self.size, 0, f"{what} (size)"
        ).tolist()
        joined = self.all_gather(_bytes(mine).to(self._device), lengths, 0, what).cpu().numpy().tobytes()
        ends = [sum(lengths[: rank + 1]) for rank in range(self.size)]
        return [joined[end - length : end].decode() for end, length in zip(ends, lengths, strict=True)]

    def _run(self, operation: Callable[[], Tensor], what: str) -> Tensor:
        if self._broken:
            raise RankError(
                f"rank {self.rank} of {self.size}, {what}: the ranks have lost each other before. {self._broken}"
            )
        try:
            return operation()
        except BaseException as error:  # an interrupt too leaves the ranks at different places
            self._broken = f"{type(error).__name__}: {error}" if not isinstance(error, RankError) else str(error)
            raise

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self

    def __copy__(self) -> Group:
        return self

    def __reduce__(self) -> Any:
        if self.size == 1:
            return _local, ()
        raise TypeError(
            f"a model that {self.size} ranks share cannot be pickled: rank {self.rank} holds a part of it, and the group belongs to its "
            "process. Save our shards (save_mp_checkpoint_path=FOLDER) and call init_inference(checkpoint=FOLDER) in the other process"
        )


LOCAL = Group(None)


def _local() -> Group:
    return LOCAL


def make_group(
    process_group: dist.ProcessGroup | None = None, *, timeout_s: float, shared_memory: bool = True
) -> Group:
    """The group of a torch.distributed group, or of the default one: all its ranks call this together.

    Every operation ends within `timeout_s`, by RankError where ranks do not come. The group of one rank is LOCAL.
    Tensors on CPUs travel through shared memory where all ranks are on one host and have the kernels, unless
    `shared_memory` is False on any of them.
    """
    if dist.get_world_size(process_group) == 1:
        return LOCAL
    distributed = Distributed(process_group, timeout_s)
    group = Group(distributed)
    homes = [Home.unpacked(text) for text in group._texts(Home.here().packed(), "exchange of hosts")]
    distributed.peers = peers = Peers(homes, group.rank)
    reason = "it is switched off" if not shared_memory else why_not(group.size)
    reason = group.any_fault(reason, "exchange of kernels") or (
        None if peers.on_one_host else "the ranks are on several hosts"
    )
    if reason:
        return Group(distributed, why_not_shared=reason)
    return _with_shared_memory(group, distributed, peers, timeout_s)


def _with_shared_memory(group: Group, distributed: Distributed, peers: Peers, timeout_s: float) -> Group:
    """The group with memory that rank 0 makes and all map; without it where that fails. No file is left behind."""
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


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def _shortened(value: str, other: str) -> str:
    """A value, from shortly before the first character at which it differs from the other."""
    if len(value) <= SHOWN:
        return repr(value)
    same = next((i for i, (a, b) in enumerate(zip(value, other, strict=False)) if a != b), min(len(value), len(other)))
    start = max(0, same - SHOWN // 4)
    return ("…" if start else "") + repr(value[start : start + SHOWN]) + ("…" if start + SHOWN < len(value) else "")
