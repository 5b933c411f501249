"""Operations that are left to the device, as NCCL's are: on CPUs, by gloo or by nothing in its place."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from infuse.graphs.rank_backend import RankBackend
from infuse.ground.errors import RankError
from infuse.parallel import liveness
from infuse.parallel.distributed import Distributed
from infuse.parallel.group import Group, make_group
from infuse.parallel.liveness import Heartbeat
from tests.support.fake_graph import FakeBackend
from tests.support.ranks import Ranks


def device_group(monkey: pytest.MonkeyPatch, timeout_s: float = 30) -> Group:
    """A group whose floats go the way of NCCL's."""
    group = make_group(timeout_s=timeout_s, shared_memory=False)
    monkey.setattr(Distributed, "left_to_device", lambda self, x: x.dtype == torch.float32 and x.dim() > 1)
    return group


def refused(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("NCCL error: unhandled\nand more")


def sums_and_pieces() -> tuple[Tensor, Tensor, int]:
    with pytest.MonkeyPatch.context() as monkey:
        group = device_group(monkey)
        x = torch.full((2, 2), 1.0 + group.rank)
        return group.all_reduce(x.clone(), "the sum"), group.all_gather(x, [2, 2], 0, "the pieces"), group.queued()


def test_device_operations(ranks: Ranks) -> None:
    for total, pieces, queued in ranks.run(2, sums_and_pieces):
        assert torch.equal(total, torch.full((2, 2), 3.0)) and pieces[:, 0].tolist() == [1, 1, 2, 2] and queued == 2


def an_operation_is_refused(operation: str) -> tuple[str, str]:
    """Outside a graph: what is raised, and what the next operation says."""
    with pytest.MonkeyPatch.context() as monkey:
        group = device_group(monkey, timeout_s=5)
        monkey.setattr(dist, operation, refused)
        x, texts = torch.ones(2, 2), []
        for _ in range(2):
            try:
                group.all_reduce(x, "the sum") if operation == "all_reduce" else group.all_gather(
                    x, [2, 2], 0, "the pieces"
                )
            except RankError as error:
                texts.append(str(error))
        return texts[0], texts[1]


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather"])
def test_an_operation_that_is_refused_is_told(operation: str, ranks: Ranks) -> None:
    for rank, (first, second) in enumerate(ranks.run(2, an_operation_is_refused, operation)):
        assert first.startswith(f"rank {rank} of 2, the ") and "(NCCL error: unhandled)" in first
        assert "the process group failed earlier" in second


def waited(rank: int, monkey: pytest.MonkeyPatch) -> None:
    """On rank 0, return when rank 1 waits and has looked into the store twice."""
    meeting, beat = dist.group.WORLD.get_group_store(), Heartbeat.beat
    if rank == 0:
        meeting.wait(["beats 2"], timedelta(seconds=100))
        return

    def counted(self: Heartbeat, number: int, what: str) -> int | None:
        gave_up = beat(self, number, what)
        meeting.set(f"beats {meeting.add('beats', 1)}", "")
        return gave_up

    monkey.setattr(liveness, "BEAT_S", 0.0)
    monkey.setattr(Heartbeat, "beat", counted)


def a_capture_is_refused() -> tuple[str, int, Tensor]:
    """On both ranks; afterwards one rank waits for the other for longer than it takes to look into the store."""
    with pytest.MonkeyPatch.context() as monkey:
        group = device_group(monkey)
        together = RankBackend(FakeBackend(), group)
        group.all_reduce(torch.ones(2, 2), "the sum")
        with monkey.context() as inner:
            inner.setattr(dist, "all_reduce", refused)
            with pytest.raises(RuntimeError) as raised:
                together.capture(lambda: group.all_reduce(torch.ones(2, 2), "the sum"))
        assert not isinstance(raised.value, RankError)
        waited(group.rank, monkey)
        group.barrier("what comes then")
        return str(raised.value), group.queued(), group.all_reduce(torch.ones(2, 2), "the sum")


def test_a_capture_that_is_refused_is_no_end_of_the_group(ranks: Ranks) -> None:
    for text, queued, total in ranks.run(2, a_capture_is_refused):
        assert "rank 0: NCCL error: unhandled" in text and "rank 1: NCCL error: unhandled" in text
        assert queued == 1 and torch.equal(total, torch.full((2, 2), 2.0))


# ---- ranks that have left other operations to the device


def fails_after(sums: tuple[int, int], error: type[Exception] | None, how: str) -> tuple[str, bool]:
    """A step that fails after so many sums on each rank; what comes of it, and whether the group is of use."""
    with pytest.MonkeyPatch.context() as monkey:
        group = device_group(monkey)
        together = RankBackend(FakeBackend(), group)
        monkey.setattr(dist, "all_reduce", lambda x, group: None)  # queued, not waited for

        def run() -> None:
            for _ in range(sums[group.rank]):
                group.all_reduce(torch.ones(2, 2), "the sum")
            if error is not None:
                raise error("no room")

        said = "no error"
        try:
            if how == "give up":
                run()
            else:
                together.warm(run)
        except Exception as raised:
            said = f"{type(raised).__name__}: {raised}"
        if how == "give up":
            said = f"alike: {group.abort('no room')}"
        try:
            group.numbers([1], "what comes then")
        except RankError:
            return said, False
        return said, True


def test_ranks_that_fail_alike_go_on(ranks: Ranks) -> None:
    assert ranks.run(2, fails_after, (2, 2), ValueError, "warm") == [("ValueError: no room", True)] * 2
    assert ranks.run(2, fails_after, (2, 2), None, "give up") == [("alike: True", True)] * 2


def test_ranks_that_fail_after_other_sums_are_lost(ranks: Ranks) -> None:
    """The next call would add up what does not belong together."""
    for rank, (said, usable) in enumerate(ranks.run(2, fails_after, (2, 1), ValueError, "warm")):
        assert said.startswith(f"RankError: rank {rank} of 2, a step before its capture: rank 0: no room")
        assert not usable
    for said, usable in ranks.run(2, fails_after, (2, 1), torch.OutOfMemoryError, "warm"):
        assert said == "OutOfMemoryError: no room" and not usable
    for said, usable in ranks.run(2, fails_after, (2, 1), None, "warm"):
        assert said.endswith(
            "a step before its capture: the ranks have left different numbers of operations to the device"
        )
        assert not usable


def test_ranks_that_give_up_after_other_sums_are_lost(ranks: Ranks) -> None:
    assert ranks.run(2, fails_after, (2, 1), None, "give up") == [("alike: False", False)] * 2


# ---- where there are no graphs


@pytest.mark.parametrize(
    "nccl, exchange, device, why",
    [
        (True, "cpu", "cuda", ""),
        (True, "cuda", "cuda", "NCCL alone"),
        (True, "cpu", "cpu", "waits on the host"),
        (False, "cpu", "cuda", "waits on the host"),
    ],
)
def test_why_operations_cannot_be_captured(nccl: bool, exchange: str, device: str, why: str) -> None:
    distributed: Any = SimpleNamespace(
        rank=0, size=2, nccl=nccl, name="nccl" if nccl else "gloo", device=torch.device(exchange, 0)
    )
    found = Group(distributed).why_not_captured(torch.device(device))
    assert why in found if why else not found
