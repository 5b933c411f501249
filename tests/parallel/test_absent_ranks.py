"""Ranks that wait over torch.distributed name the absent ones, on any host."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from infuse.ground.errors import RankError
from infuse.parallel import liveness
from infuse.parallel.group import Group, make_group
from infuse.parallel.liveness import SUSPENDED_S, Deadline, Heartbeat, Home, keeper_of
from tests.support.over_ranks import meet_through
from tests.support.ranks import RankDied, Ranks, deadlines_end_when_all_wait

SUM = "all-reduce of model.layers.3.mlp"


def hosts_of_their_own() -> Group:
    """A group of ranks that do not see each other's processes."""
    here = Home.here()
    Home.here = lambda: Home(f"{here.host} {dist.get_rank()}", here.pid, here.processors)  # type: ignore[method-assign]
    try:
        group = make_group(timeout_s=60)
    finally:
        Home.here = classmethod(lambda cls: here)  # type: ignore[method-assign]
    assert group.describe() == "gloo"
    group.barrier("the start")
    return group


def comes_later() -> None:
    """Ranks 0 and 2 wait for rank 1, and rank 0 gives up."""
    meeting, group = dist.group.WORLD.get_group_store(), hosts_of_their_own()
    if group.rank == 1:
        meeting.wait(["over 0", "over 2"], timedelta(seconds=60))
        return
    with deadlines_end_when_all_wait([0, 2], rank_that_gives_up=0):
        try:
            group.all_reduce(torch.ones(4), SUM)
        finally:
            meeting.set(f"over {group.rank}", "")


def is_absent(who: list[int], how: str, keeper: int | None) -> None:
    """Ranks `who` end, or sleep until the others have given up. `keeper`: the rank that keeps the store, None where it
    is a file.
    """
    meeting = dist.group.WORLD.get_group_store()
    if keeper is not None:
        meet_through(keeper)
    group = hosts_of_their_own()
    x = torch.ones(4)
    if group.rank not in who:
        with deadlines_end_when_all_wait([rank for rank in range(group.size) if rank not in who]):
            try:
                group.all_reduce(x, SUM)
            finally:
                meeting.set(f"over {group.rank}", "")
    elif how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        meeting.wait([f"over {rank}" for rank in range(group.size) if rank not in who], timedelta(seconds=60))


@pytest.mark.slow
@pytest.mark.parametrize("who", [[1], [0], [0, 2]], ids=lambda who: f"rank {who}")
def test_ranks_that_sleep_are_named(ranks: Ranks, who: list[int]) -> None:
    found = ranks.run_expecting_errors(3, is_absent, who, "sleeping", None)
    here = [rank for rank in range(3) if rank not in who]
    for rank in here:
        text = str(found[rank])
        assert isinstance(found[rank], RankError), found
        assert text.startswith(f"rank {rank} of 3, {SUM}") and ("within 60 s" in text or "gave up" in text)
        assert f": rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))} did not come" in text
        assert (f"; rank {here[0]} waits" if len(here) == 1 else f"; ranks {here[0]}, {here[1]} wait") in text
    assert all(found[rank] is None for rank in who)


@pytest.mark.slow
def test_ranks_give_up_together(ranks: Ranks) -> None:
    found = ranks.run_expecting_errors(3, comes_later)
    assert str(found[0]).endswith(": rank 1 did not come within 60 s; ranks 0, 2 wait"), found
    assert str(found[2]).endswith(
        ": rank 1 did not come before rank 0 gave up; ranks 0, 2 wait; rank 0 gave up first"
    ), found


def test_fewer_ranks_meet_anew_at_once(ranks: Ranks) -> None:
    """gloo waits on for a rank that did not come; the pool must not wait with it."""
    assert ranks.run_expecting_errors(4, is_absent, [3], "sleeping", None)[3] is None
    assert ranks.run(2, dist.get_world_size, timeout=30) == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("who", [1, 0])
def test_a_rank_that_was_killed_on_another_host_is_named(ranks: Ranks, who: int) -> None:
    found = ranks.run_expecting_errors(3, is_absent, [who], "killed", None)
    assert isinstance(found[who], RankDied)
    for rank in {0, 1, 2} - {who}:
        assert isinstance(found[rank], RankError), found
        assert f"rank {rank} of 3, {SUM}" in str(found[rank]) and f": rank {who} " in str(found[rank])


def test_the_keeper_of_the_store_is_named_where_nobody_answers(ranks: Ranks) -> None:
    found = ranks.run_expecting_errors(3, is_absent, [0], "killed", 0)
    assert isinstance(found[0], RankDied)
    for rank in (1, 2):
        assert isinstance(found[rank], RankError), found
        assert "rank 0, which keeps the store of torch.distributed at 127.0.0.1:" in str(found[rank]), found[rank]
        assert SUM in str(found[rank]) and "out of reach" in str(found[rank])


def waits_elsewhere() -> tuple[list[int], str] | None:
    """Rank 0 gives up; rank 1 waits in an earlier operation, rank 2 waited in this one and does so no more, rank 3
    gives up too.
    """
    meeting, rank = dist.group.WORLD.get_group_store(), dist.get_rank()
    heartbeat = Heartbeat(None)
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(liveness, "BEAT_S", 0.0)  # every call of `beat` writes
        heartbeat.start()
        if rank == 1:
            while not meeting.check(["over"]):
                heartbeat.beat(7, "the gather")
                meeting.set("wrote 1", "")
        elif rank == 2:
            heartbeat.beat(8, "the sum")
            meeting.set("wrote 2", "")
        elif rank == 3:
            monkey.setattr(liveness, "LOOK_S", 0.0)
            heartbeat.give_up(8, "the sum")
            meeting.set("wrote 3", "")
        else:
            meeting.wait(["wrote 1", "wrote 2", "wrote 3"], timedelta(seconds=60))
            found = heartbeat.give_up(8, "the sum")
            meeting.set("over", "")
            assert not heartbeat.store_failure
            return found
    return None


@pytest.mark.slow
def test_who_waits_elsewhere_and_who_does_so_no_more(ranks: Ranks) -> None:
    assert ranks.run(4, waits_elsewhere)[0] == (
        [2],
        "ranks 0, 3 wait; rank 1 waits in the gather; rank 3 gave up first",
    )


def test_the_keeper_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    keeps = f", which keeps the store of torch.distributed at 127.0.0.1:{store.port}, is gone or out of reach"
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert keeper_of(dist.PrefixStore("a", dist.PrefixStore("b", store)), [2, 0, 1]) == f"rank 1{keeps}"
    assert keeper_of(store, [2, 3]) == f"rank 0 of the world{keeps}"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert keeper_of(store, [0, 1]) == f"torchrun{keeps}"
    assert keeper_of(dist.HashStore(), [0]) == "the HashStore of torch.distributed cannot be reached"


def test_time_while_the_process_was_suspended_counts_as_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    deadline = Deadline(3 * SUSPENDED_S)
    now += 1000
    assert not deadline.is_over()
    for _ in range(4):
        now += SUSPENDED_S / 2
        assert not deadline.is_over()
    now += SUSPENDED_S / 2
    assert deadline.is_over()
