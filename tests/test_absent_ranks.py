"""Ranks that do not come to an operation over torch.distributed are named with it by those that wait, on whatever host
they are.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import RankDied, Ranks

from infuse.errors import RankError
from infuse.parallel.group import Group, make_group
from infuse.parallel.peers import Home
from infuse.parallel.waiting import BEAT_S, PAUSE_S, Patience, RollCall, _keeper

SUM = "all-reduce of model.layers.3.mlp"


def hosts_of_their_own() -> Group:
    """A group of ranks that do not see each other's processes, and wait 4 s for each other once they have met."""
    here = Home.here()
    Home.here = lambda: Home(f"{here.host} {dist.get_rank()}", here.pid, here.processors)  # type: ignore[method-assign]
    try:
        group = make_group(timeout_s=60)
    finally:
        Home.here = classmethod(lambda cls: here)  # type: ignore[method-assign]
    assert group.describe() == "gloo" and group._distributed is not None
    group.barrier("the start")
    group._distributed._timeout_s = 4
    return group


def comes_later() -> None:
    """Rank 2 begins to wait for rank 1 when rank 0 has waited for a while."""
    meeting, group = dist.group.WORLD.get_group_store(), hosts_of_their_own()
    assert group._distributed is not None
    group._distributed._timeout_s = 60 if group.rank == 2 else 5
    if group.rank == 1:
        meeting.wait(["over 0", "over 2"], timedelta(seconds=60))
        return
    time.sleep(2 if group.rank == 2 else 0)
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
        try:
            group.all_reduce(x, SUM)
        finally:
            meeting.set(f"over {group.rank}", "")
    elif how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        meeting.wait([f"over {rank}" for rank in range(group.size) if rank not in who], timedelta(seconds=60))


def meet_through(keeper: int) -> None:
    """Set up torch.distributed anew, with a store that a rank keeps."""
    rank, size, met = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.get_group_store()
    if rank == keeper:
        store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        met.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(met.get("port")), None, is_master=False, wait_for_workers=False)
    global kept  # as long as the process
    kept = met
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))


@pytest.mark.parametrize("who", [[1], [0], [0, 2]], ids=lambda who: f"rank {who}")
def test_ranks_that_sleep_are_named(ranks: Ranks, who: list[int]) -> None:
    found = ranks.run_expecting_errors(3, is_absent, who, "sleeping", None)
    here = [rank for rank in range(3) if rank not in who]
    for rank in here:
        text = str(found[rank])
        assert isinstance(found[rank], RankError), found
        assert text.startswith(f"rank {rank} of 3, {SUM}") and ("within 4 s" in text or "gave up" in text)
        assert f": rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))} did not come" in text
        assert (f"; rank {here[0]} waits" if len(here) == 1 else f"; ranks {here[0]}, {here[1]} wait") in text
    assert all(found[rank] is None for rank in who)


def test_ranks_give_up_together(ranks: Ranks) -> None:
    found = ranks.run_expecting_errors(3, comes_later)
    assert str(found[0]).endswith(": rank 1 did not come within 5 s; ranks 0, 2 wait"), found
    assert str(found[2]).endswith(
        ": rank 1 did not come before rank 0 gave up; ranks 0, 2 wait; rank 0 had given up"
    ), found


def test_fewer_ranks_meet_anew_at_once(ranks: Ranks) -> None:
    """gloo waits on for a rank that did not come; the pool must not wait with it."""
    assert ranks.run_expecting_errors(4, is_absent, [3], "sleeping", None)[3] is None
    assert ranks.run(2, dist.get_world_size, timeout=30) == [2, 2]


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
    meeting, roll_call, rank = dist.group.WORLD.get_group_store(), RollCall(None, dist.get_rank(), 4), dist.get_rank()
    roll_call.begins()
    while rank in (1, 2) and not meeting.check(["over"]):
        if rank == 1 or not meeting.check(["wrote"]):
            roll_call.goes_on(*((7, "the gather") if rank == 1 else (8, "the sum")))
        if roll_call._beat:
            meeting.add("wrote", rank == 2)
        time.sleep(0.05)
    if rank == 3:
        roll_call._write([-1, 8, "the sum"])
        meeting.set("gave up", "")
    if rank == 0:
        meeting.wait(["wrote", "gave up"], timedelta(seconds=60))
        time.sleep(2 * BEAT_S)
        found = roll_call.result(8, "the sum")
        meeting.set("over", "")
        assert not roll_call.lost
        return found
    return None


def test_who_waits_elsewhere_and_who_does_so_no_more(ranks: Ranks) -> None:
    assert ranks.run(4, waits_elsewhere)[0] == ([2], "ranks 0, 3 wait; rank 1 waits in the gather; rank 3 had given up")


def test_the_keeper_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    keeps = f", which keeps the store of torch.distributed at 127.0.0.1:{store.port}, is gone or out of reach: it"
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert _keeper(dist.PrefixStore("a", dist.PrefixStore("b", store)), [2, 0, 1]) == f"rank 1{keeps}"
    assert _keeper(store, [2, 3]) == f"rank 0 of the world{keeps}"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert _keeper(store, [0, 1]) == f"torchrun{keeps}"
    assert _keeper(dist.HashStore(), [0]) == "the HashStore of torch.distributed"


def test_a_pause_of_the_process_is_no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    patience = Patience(3 * PAUSE_S)
    now += 1000
    assert not patience.is_over()  # a second of it counts
    for _ in range(4):
        now += PAUSE_S / 2
        assert not patience.is_over()
    now += PAUSE_S / 2
    assert patience.is_over()
