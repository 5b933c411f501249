"""Collectives that a recorder may capture, in the place of NCCL's, on CPUs over gloo.

- While a capture goes on they do nothing; a replay runs them.
- NCCL wants the same of all ranks: an operation is of the same graph everywhere, or of none. Here that is an error on
every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from infuse.parallel.distributed import gathered_shape
from infuse.parallel.group import Group
from tests.support.fake_graph import FakeBackend, FakeCaptured

_BACKEND: list[FakeBackend] = []  # the one whose captures there are: operations know no objects
_REPLAYED: list[int] = [-1]
MIXED = "is of a graph on some ranks, and of none or of another one on others"


def _together(what: int) -> bool:
    """Whether to run; once all ranks do the same."""
    if _BACKEND[-1].capturing():
        return False
    mine = torch.tensor([_REPLAYED[-1], what])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    if any(not torch.equal(other, mine) for other in everyone):
        raise RuntimeError(f"an operation {MIXED}: {everyone}")
    return True


@torch.library.custom_op("fake_nccl::sum", mutates_args={"x"})
def fake_sum(x: Tensor) -> None:
    if _together(x.numel()):
        dist.all_reduce(x)


@torch.library.custom_op("fake_nccl::first", mutates_args={"x"})
def fake_broadcast(x: Tensor) -> None:
    if _together(x.numel()):
        dist.broadcast(x, 0)


@torch.library.custom_op("fake_nccl::gather", mutates_args={"whole"})
def fake_gather(x: Tensor, whole: Tensor, sizes: Sequence[int], axis: int) -> None:
    if not _together(whole.numel()):
        return
    pieces = [x.new_zeros([*x.shape[:axis], max(sizes), *x.shape[axis + 1 :]]) for _ in sizes]
    mine = torch.zeros_like(pieces[0])
    mine.narrow(axis, 0, x.shape[axis]).copy_(x)
    dist.all_gather(pieces, mine)
    whole.copy_(torch.cat([piece.narrow(axis, 0, size) for piece, size in zip(pieces, sizes, strict=True)], dim=axis))


class FakeNccl:
    """In the place of a group's transport for tensors of the device."""

    name = "nccl"

    def all_reduce(self, x: Tensor, what: str) -> Tensor:
        fake_sum(x)
        return x

    def all_gather(self, x: Tensor, sizes: Sequence[int], axis: int, what: str) -> Tensor:
        whole = x.new_empty(gathered_shape(x, sizes, axis))
        fake_gather(x, whole, list(sizes), axis)
        return whole

    def broadcast(self, x: Tensor, what: str) -> Tensor:
        fake_broadcast(x)
        return x


def put_in(group: Group, backend: FakeBackend, monkey: Any) -> None:
    """Make `group` one whose floats and tokens travel by FakeNccl; what the ranks tell each other on the host goes as
    before.

    `monkey` is a pytest.MonkeyPatch.
    """
    host = group._transport(torch.zeros(1))
    _BACKEND.append(backend)
    replay = FakeCaptured.replay

    def replayed(self: FakeCaptured) -> None:
        _REPLAYED.append(next(i for i, captured in enumerate(backend.captures) if captured is self))
        try:
            replay(self)
        finally:
            _REPLAYED.pop()

    monkey.setattr(FakeCaptured, "replay", replayed)
    told: list[str] = []
    run = group._run

    def checked(operation: Any, what: str) -> Tensor:
        told.append(what)
        return run(operation, what)

    def transport(self: Group, x: Tensor) -> Any:
        of_the_device = x.dtype.is_floating_point or told[-1] == "the tokens"
        assert of_the_device or not backend.capturing(), f"{told[-1]}: the host waits while a graph is captured"
        return FakeNccl() if of_the_device and not told[-1].startswith("abort") else host

    monkey.setattr(group, "_run", checked)
    monkey.setattr(Group, "_transport", transport)
    monkey.setattr(Group, "why_not_captured", lambda self, device: "")
