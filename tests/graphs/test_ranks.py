"""Graphs of ranks that share a model, on recorders: the same tokens, the same decisions everywhere, whatever happens on
one rank.

NCCL has a stand-in (fake_nccl.py) that refuses what NCCL forbids: an operation that is of a graph on one rank and of
none on another.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import infuse
from infuse.generate.install import GraphUse, install, uninstall
from infuse.graphs.rank_backend import RankBackend
from tests.models.families import BY_NAME, inputs
from tests.support import fake_nccl
from tests.support.fake_graph import FakeBackend
from tests.support.graphed import Greedy
from tests.support.over_ranks import engine_of
from tests.support.ranks import Ranks, same

NEW = 14


@contextmanager
def graphed_ranks(
    name: str = "llama", *, forward: bool = False, steps: bool = True, **keys: Any
) -> Iterator[tuple[Any, FakeBackend]]:
    """The engine of this rank, its graphs recorded, sums over ranks by the stand-in for NCCL's."""
    engine = engine_of(name, dict(tie_word_embeddings=False), **keys)
    uninstall(engine.module)
    backend = FakeBackend()
    with pytest.MonkeyPatch.context() as monkey:
        fake_nccl.put_in(engine.group, backend, monkey)
        monkey.setattr(
            "infuse.layers.embedding.check", lambda *args: None
        )  # a look on the host, which is for CPUs alone
        # Hooks stand for what goes wrong inside of layers, and would keep them from being captured.
        monkey.setattr("infuse.generate.install.users_hooks", lambda modules: False)
        use = GraphUse(backend, steps=steps, forward=forward)
        install(engine.module, limit_tokens=None, min_new_tokens=1, caches=True, graphs=use, group=engine.group)
        yield engine, backend


def given(seed: int = 11, padding: str | None = "left", batch: int = 3) -> dict[str, Tensor]:
    return inputs(BY_NAME["llama"], batch=batch, tokens=9, padding=padding, seed=seed)


def exact(seed: int = 11, padding: str | None = "left", **kwargs: Any) -> Tensor:
    original = BY_NAME["llama"].make(tie_word_embeddings=False)
    return original.generate(**given(seed, padding), **{"max_new_tokens": NEW, **kwargs})


def counts(backend: FakeBackend) -> tuple[int, int, int]:
    return len(backend.captures), backend.warmed, backend.replays


# ---- tokens


def generated(mode: dict[str, Any]) -> tuple[list[Tensor], list[tuple[int, int, int]]]:
    found, done = [], []
    with graphed_ranks() as (engine, backend), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for call, padding in enumerate(("left", None, "left")):
            torch.manual_seed(dist.get_rank() + call)
            found.append(engine.generate(**given(11 + call, padding), max_new_tokens=NEW, **mode))
            done.append(counts(backend))
    return found, done


MODES = {"greedy": dict(), "host chooses": dict(no_repeat_ngram_size=2), "beams": dict(num_beams=2)}


@pytest.mark.parametrize("mode", MODES)
def test_tokens(mode: str, ranks: Ranks) -> None:
    results = ranks.run(2, generated, MODES[mode])
    for tokens, done in results:
        for call, padding in enumerate(("left", None, "left")):
            assert torch.equal(tokens[call], exact(11 + call, padding, **MODES[mode]))
        assert done == [(1, 1, 13 * (call + 1) - 2) for call in range(3)]


def test_sampled_tokens_are_rank_0s(ranks: Ranks) -> None:
    """Seeds and scores differ between the ranks: one broadcast in the step makes them agree."""
    (first, done), (second, _) = ranks.run(2, generated, dict(do_sample=True, temperature=1.5, top_k=30))
    assert same([torch.stack(first), torch.stack(second)]) and done[-1] == (1, 1, 37)
    assert len({tuple(row.tolist()) for row in torch.cat(first)}) == 9


def other_scores() -> Tensor:
    with graphed_ranks() as (engine, backend):
        head = engine.module.lm_head
        head.register_forward_hook(lambda module, args, output: output.roll(dist.get_rank(), -1))
        found = engine.generate(**given(), max_new_tokens=NEW)
        assert backend.replays
    return found


def test_tokens_are_rank_0s_where_another_rank_has_other_scores(ranks: Ranks) -> None:
    first, second = ranks.run(2, other_scores)
    assert torch.equal(first, second) and torch.equal(first, exact())


def forwards() -> tuple[list[Tensor], tuple[int, int, int]]:
    found = []
    with graphed_ranks(forward=True) as (engine, backend), torch.no_grad():
        for step in range(5):
            for batch in (1, 3):
                found.append(engine.module(**given(step, None, batch), use_cache=False).logits)
        return found, counts(backend)


def test_forward(ranks: Ranks) -> None:
    original = BY_NAME["llama"].make(tie_word_embeddings=False)
    for found, done in ranks.run(2, forwards):
        assert done == (2, 2, 6)
        for i, (step, batch) in enumerate((step, batch) for step in range(5) for batch in (1, 3)):
            with torch.no_grad():
                assert torch.allclose(found[i], original(**given(step, None, batch)).logits, atol=1e-4)


# ---- ranks that differ


def capture_fails_on(rank: int, error: Exception, forward: bool) -> tuple[list[Tensor], int, list[str]]:
    found = []
    with (
        graphed_ranks(forward=forward, steps=not forward) as (engine, backend),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        if dist.get_rank() == rank:
            backend.fail = error
        with torch.no_grad():
            for _ in range(4):
                if forward:
                    found.append(engine.module(**given(), use_cache=False).logits)
                else:
                    found.append(engine.generate(**given(), max_new_tokens=NEW))
        return found, backend.replays, [str(warning.message) for warning in told if "infuse" in str(warning.message)]


FAULTS = {"fault": RuntimeError("a kernel that cannot"), "memory": torch.OutOfMemoryError("CUDA out of memory")}


@pytest.mark.parametrize("error", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("forward", [False, True])
def test_a_capture_that_fails_on_one_rank(forward: bool, error: Exception, ranks: Ranks) -> None:
    """All run without, and say why: which rank it was."""
    for found, replays, told in ranks.run(2, capture_fails_on, 1, error, forward):
        assert not replays and len(told) == 1 and f"rank 1: {error}" in told[0]
        if not forward:
            assert all(torch.equal(tokens, exact()) for tokens in found)


def evicting(limits: tuple[int, int]) -> tuple[list[int], tuple[int, int, int]]:
    """Batches of one to three rows; each rank has another bound."""
    with graphed_ranks() as (engine, backend):
        buckets = engine.module._infuse.buckets
        for batch in (1, 2, 3, 1, 2, 3):
            engine.generate(**given(batch=batch), max_new_tokens=NEW)
            if batch == 3:
                sizes = [bucket.nbytes() for bucket in buckets.idle]
                buckets.limit_bytes = sum(sizes[-limits[dist.get_rank()] :]) + 100
        engine.generate(**given(batch=3), max_new_tokens=NEW)
        return [bucket.batch for bucket in buckets.idle], counts(backend)


@pytest.mark.slow
def test_the_least_room_of_any_rank_bounds_all(ranks: Ranks) -> None:
    first, second = ranks.run(2, evicting, (3, 1))
    assert first == second == ([3], first[1]) and first[1][0] > 3


def forgetting() -> tuple[tuple[int, int, int], tuple[int, int, int], bool]:
    """Rank 1 loses its graphs by itself, then moves its weights: the next call finds that out, and all begin again."""
    with graphed_ranks(forward=True) as (engine, backend), torch.no_grad():
        right = True
        for change in range(3):
            if change == 1 and dist.get_rank() == 1:
                engine.module._infuse.buckets.clear()
                engine.module.forward.clear()
            if change == 2 and dist.get_rank() == 1:
                for p in engine.module.parameters():
                    p.data = p.data.clone()
            for _ in range(4):
                right &= torch.equal(engine.generate(**given(), max_new_tokens=NEW), exact())
                engine.module(**given(), use_cache=False)
            if change == 0:
                before = counts(backend)
        return before, counts(backend), right


@pytest.mark.slow
def test_ranks_that_keep_other_graphs_begin_again(ranks: Ranks) -> None:
    first, second = ranks.run(2, forgetting)
    assert first == second and first[2]
    assert first[0][0] == 2 and first[1][0] == 6


def failing_before_a_capture(uniform: bool) -> str:
    """A layer fails in the run before the capture, on both ranks or on one."""
    with graphed_ranks() as (engine, backend):
        calls = 0

        def fails(module: Any, args: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 4 and (uniform or dist.get_rank() == 1):
                raise ValueError("a layer that fails once")

        # before the first sum, so that the stand-in's gloo does not wait for a rank that is gone
        engine.module.model.embed_tokens.register_forward_pre_hook(fails)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = engine.generate(**given(), max_new_tokens=NEW)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "right" if torch.equal(found, exact()) else "wrong"


def test_a_step_that_fails_on_all_ranks_is_made_again(ranks: Ranks) -> None:
    assert ranks.run(2, failing_before_a_capture, True) == ["right", "right"]


def on_one_rank(how: str, error: Exception, of_rank_0: Exception | None = None) -> tuple[str, bool]:
    """What is raised where rank 1's run fails, or each rank's, and whether the group is of use after it."""
    engine = engine_of("llama")
    together = RankBackend(FakeBackend(), engine.group)

    def run() -> Tensor:
        mine = error if dist.get_rank() else of_rank_0
        if mine is not None:
            raise mine
        return torch.ones(1) * 2

    try:
        getattr(together, how)(run)
    except Exception as raised:
        text = f"{type(raised).__name__}: {raised}"
    try:
        engine.group.barrier("what comes then")
    except infuse.RankError:
        return text, False
    return text, True


def test_a_run_before_a_capture_that_fails_on_one_rank(ranks: Ranks) -> None:
    """The others' sums of that run have waited in vain: they cannot make it again."""
    for rank, (text, usable) in enumerate(ranks.run(2, on_one_rank, "warm", ValueError("no such kernel"))):
        assert (
            text.startswith(f"RankError: rank {rank} of 2, a step before its capture: rank 1: no such kernel")
            and not usable
        )
    (first, _), (second, _) = ranks.run(2, on_one_rank, "warm", torch.OutOfMemoryError("no room"))
    assert (
        first.startswith("RankError: rank 0 of 2, a step before its capture: rank 1: no room")
        and second == "OutOfMemoryError: no room"
    )


def test_what_one_rank_cannot_capture_is_told_to_all(ranks: Ranks) -> None:
    for error in FAULTS.values():
        for text, usable in ranks.run(2, on_one_rank, "capture", error):
            assert text.startswith(f"RuntimeError: rank 1: {error}") and usable


@pytest.mark.parametrize("of_rank_0", [*FAULTS.values(), infuse.RankError("NCCL refuses it")], ids=[*FAULTS, "refused"])
def test_what_no_rank_can_capture_is_the_same_error_on_all(of_rank_0: Exception, ranks: Ranks) -> None:
    """One rank's memory, or what NCCL makes of a capture, does not part the ranks, nor is it an end of the group."""
    for text, usable in ranks.run(2, on_one_rank, "capture", infuse.RankError("NCCL refuses it"), of_rank_0):
        assert text.startswith(f"RuntimeError: rank 0: {of_rank_0}") and "; rank 1: NCCL refuses it" in text and usable


# ---- where there can be none


def without_capturable_collectives(keys: dict[str, Any]) -> tuple[list[str], str, bool, bool]:
    with pytest.MonkeyPatch.context() as monkey, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        backend = FakeBackend()
        monkey.setattr("infuse.engine.model.backend_for", lambda device: backend)
        engine = engine_of("llama", **keys)
        right = torch.equal(engine.generate(**given(), max_new_tokens=NEW), exact())
        return (
            [str(w.message) for w in told if "CUDA graphs" in str(w.message)],
            str(engine.plan),
            right,
            bool(backend.warmed),
        )


def test_where_sums_cannot_be_captured_the_plan_says_so(ranks: Ranks) -> None:
    for told, plan, right, warmed in ranks.run(2, without_capturable_collectives, {}):
        assert len(told) == 1 and "no CUDA graphs: the ranks add up by" in told[0] and plan.count("no CUDA graphs") == 1
        assert right and not warmed
    for told, plan, right, warmed in ranks.run(2, without_capturable_collectives, dict(enable_cuda_graph=False)):
        assert not told and "no CUDA graphs" not in plan and right and not warmed


# ---- memory


def out_of_memory(on: tuple[int, ...], call: str, timeout_s: float) -> tuple[str, float, bool]:
    """What a call raises where some ranks run out of memory in the second layer, how long it takes, and whether the
    next one is right.
    """
    keys: dict[str, Any] = {"tensor_parallel": {"tp_size": dist.get_world_size(), "timeout_s": timeout_s}}
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr("infuse.engine.model.backend_for", lambda device: FakeBackend())
        engine = engine_of("llama", dict(tie_word_embeddings=False), enable_cuda_graph=False, **keys)
    module = engine.module
    layer = module.model.layers[1] = Greedy(module.model.layers[1])
    layer.rows = 2 if dist.get_rank() in on else 4
    began = time.monotonic()
    try:
        with torch.no_grad():
            engine(**given()) if call == "forward" else engine.generate(**given(), max_new_tokens=NEW)
    except infuse.InfuseError as error:
        text, took = f"{type(error).__name__}: {error}", time.monotonic() - began
    layer.rows = 4
    try:
        return text, took, torch.equal(engine.generate(**given(), max_new_tokens=NEW), exact())
    except infuse.RankError:
        return text, took, False


@pytest.mark.parametrize("call", ["forward", "generate"])
def test_out_of_memory_on_one_rank_is_told_to_the_others(call: str, ranks: Ranks) -> None:
    results = ranks.run(3, out_of_memory, (1,), call, 100)
    for rank, (text, took, right) in enumerate(results):
        assert took < 50 and not right
        if rank == 1:
            assert (
                text.startswith("OutOfMemory: ")
                and "no memory left for this call" in text
                and "The process group failed" in text
            )
        else:
            assert text.startswith("RankError: ") and f"rank {rank} of 3" in text and "rank 1 " in text
            assert "abort: no memory left on the device" in text


@pytest.mark.parametrize("call", ["forward", "generate"])
def test_out_of_memory_on_all_ranks_is_over_with_the_call(call: str, ranks: Ranks) -> None:
    for text, _, right in ranks.run(2, out_of_memory, (0, 1), call, 100):
        assert text.startswith("OutOfMemory: ") and "The engine can be used on." in text and right


def out_of_memory_over_graphs(rows: int) -> tuple[str, list[bool]]:
    """Rank 1 has no memory for a larger batch, once there are graphs of a smaller one."""
    with graphed_ranks() as (engine, backend):
        right = [torch.equal(engine.generate(**given(), max_new_tokens=NEW), exact())]
        layer = engine.module.model.layers[1] = Greedy(engine.module.model.layers[1])
        layer.rows = rows
        try:
            engine.generate(**given(batch=6), max_new_tokens=NEW)
        except infuse.InfuseError as error:
            text = type(error).__name__
        right.append(not engine.module._infuse.buckets.idle)
        right.append(torch.equal(engine.generate(**given(), max_new_tokens=NEW), exact()))
        return text, right


def test_out_of_memory_over_graphs(ranks: Ranks) -> None:
    assert ranks.run(2, out_of_memory_over_graphs, 4) == [("OutOfMemory", [True, True, True])] * 2
