"""Failures of ranks raise errors that name rank and operation, on every rank, soon; and which ranks share a model."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import infuse
from tests.models.families import BY_NAME, inputs
from tests.support.checkpoints import on_meta, outputs, state_of
from tests.support.forked import Program
from tests.support.over_ranks import TOLERANCE, distance, engine_of, meet_through
from tests.support.ranks import RankDied, Ranks, same

ROOT = Path(__file__).parents[2]


# ---- ranks that differ ----


def other_inputs(how: str) -> None:
    engine = engine_of("llama")
    ids = inputs(BY_NAME["llama"])["input_ids"]
    if dist.get_rank() == 1:
        ids = {"values": ids + 1, "shape": ids[:, 1:], "batch": ids[:1]}[how]
    engine(ids)


@pytest.mark.parametrize("how", ["values", "shape", "batch"])
def test_inputs_that_differ_are_named_on_every_rank(how: str, ranks: Ranks) -> None:
    for rank, error in enumerate(ranks.run_expecting_errors(2, other_inputs, how)):
        assert isinstance(error, infuse.RankError) and "the inputs of forward" in str(error)
        assert f"rank {rank} of 2" in str(error) and "rank 1 differs" in str(error)


def other_settings(keys: list[dict]) -> None:
    engine_of("llama", **keys[dist.get_rank()])


@pytest.mark.parametrize(
    "theirs", [{"quant": "int8:4"}, {"replace_with_kernel_inject": False}, {"dtype": "bf16"}], ids=str
)
def test_settings_that_differ_raise_before_anything_is_done(theirs: dict, ranks: Ranks) -> None:
    for error in ranks.run_expecting_errors(2, other_settings, [{}, theirs]):
        assert isinstance(error, infuse.RankError) and "the plan: rank 1 differs from rank 0" in str(error)


def test_settings_that_one_rank_refuses_raise_on_the_other_too(ranks: Ranks) -> None:
    """Only a look at the model shows that nothing has that name: no rank waits for the one that gave up."""
    theirs = {"quant": {"weight": {"post_init_quant": {"no_such_linear": {"num_bits": 8, "group_size": 4}}}}}
    told, refused = ranks.run_expecting_errors(2, other_settings, [{}, theirs], timeout=60)
    assert isinstance(refused, infuse.ConfigError) and "no_such_linear" in str(refused)
    assert isinstance(told, infuse.RankError)
    assert "rank 1 failed in init_inference: ConfigError: " in str(told)
    assert "no_such_linear" in str(told)


# ---- checkpoints ----


def loading(folder: str, kind: str, keys: dict) -> tuple[str, bool]:
    """The error of loading, and whether the model has all that it had."""
    model = on_meta("llama") if kind == "meta" else BY_NAME["llama"].make()
    before = state_of(model)
    try:
        infuse.init_inference(
            model, checkpoint=f"{folder}/{dist.get_rank()}", progress=False, tensor_parallel={"tp_size": 2}, **keys
        )
    except infuse.InfuseError as error:
        return f"{type(error).__name__}: {error}", state_of(model) == before
    return "", False


@pytest.mark.parametrize(("broken", "kind"), [("missing", "meta"), ("truncated", "live")])
def test_a_file_that_one_rank_lacks_is_an_error_on_all(broken: str, kind: str, tmp_path: Path, ranks: Ranks) -> None:
    BY_NAME["llama"].make().save_pretrained(tmp_path / "0")
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    file = tmp_path / "1" / "model.safetensors"
    if broken == "missing":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size - 1)
    (first, first_whole), (second, second_whole) = ranks.run(2, loading, str(tmp_path), kind, {"dtype": "fp32"})
    assert first_whole and second_whole
    assert second.startswith("CheckpointError: ") and str(tmp_path / "1") in second
    assert first.startswith("RankError: ")
    assert "rank 1 failed in loading: CheckpointError: " in first
    assert str(tmp_path / "1") in first


def saving(folder: str) -> str:
    try:
        engine_of("llama", save_mp_checkpoint_path=folder)
    except infuse.InfuseError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def saving_on_a_full_disk(folder: str) -> str:
    """Rank 1 cannot move its file to its place."""
    replace = os.replace

    def full(source: Any, target: Any) -> None:
        raise OSError(28, "No space left on device")

    if dist.get_rank() == 1:
        os.replace = full  # type: ignore[assignment]
    try:
        return saving(folder)
    finally:
        os.replace = replace


def test_shards_that_one_rank_cannot_write_have_no_index(tmp_path: Path, ranks: Ranks) -> None:
    ranks.run(2, saving, str(tmp_path))
    assert (tmp_path / "infuse.json").is_file()
    first, second = ranks.run(2, saving_on_a_full_disk, str(tmp_path))
    assert first.startswith("CheckpointError: ")
    assert "writing the shards failed on rank 1: CheckpointError: " in first
    assert "No space left" in first
    assert second.startswith("CheckpointError: ") and "cannot be written: No space left" in second
    assert not (tmp_path / "infuse.json").exists()
    # The ranks still have each other.
    assert ranks.run(2, saving, str(tmp_path)) == ["", ""] and (tmp_path / "infuse.json").is_file()


# ---- which ranks ----


def refused(size: int) -> str:
    try:
        engine_of("llama", tensor_parallel={"tp_size": size})
    except infuse.ConfigError as error:
        return str(error)
    return ""


def test_a_size_that_does_not_divide_the_world(ranks: Ranks) -> None:
    for text in ranks.run(3, refused, 2):
        assert "found 2, which does not divide the world of 3 ranks" in text and "torchrun --nproc-per-node 2" in text


def test_ranks_without_a_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    model = BY_NAME["llama"].make()
    before = state_of(model)
    with pytest.raises(
        infuse.ConfigError, match="this process is alone; start 2 ranks: torchrun --nproc-per-node 2 SCRIPT"
    ):
        infuse.init_inference(model, dtype="fp32", tensor_parallel={"tp_size": 2}, progress=False)
    assert state_of(model) == before


def by_group() -> Tensor | str:
    """Ranks 1 and 2 of three share a model; rank 0 is not in their group."""
    group = dist.new_group([1, 2])
    try:
        engine = engine_of("llama", tensor_parallel={"tp_group": group})
    except infuse.ConfigError as error:
        return str(error)
    assert engine.group.size == 2 and engine.group.rank == dist.get_rank() - 1
    return outputs(engine, "llama")


def test_a_group_that_is_a_part_of_the_world(ranks: Ranks) -> None:
    outside, *found = ranks.run(3, by_group)
    assert "this rank is not in the given group" in outside
    assert same(found) and distance(found[0], outputs(BY_NAME["llama"].make(), "llama")) < TOLERANCE


class Mpu:
    """What Megatron gives: ranks that are two apart are parallel."""

    def __init__(self) -> None:
        groups = [dist.new_group([rank, rank + 2]) for rank in range(2)]
        self._group = groups[dist.get_rank() % 2]

    def get_model_parallel_group(self) -> Any:
        return self._group

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank() // 2

    def get_model_parallel_world_size(self) -> int:
        return 2


def by_mpu(deprecated: bool) -> tuple[int, int, Tensor]:
    keys = {"mpu": Mpu(), "tensor_parallel": {}} if deprecated else {"tensor_parallel": {"mpu": Mpu()}}
    engine = engine_of("bloom", **keys)
    return engine.group.size, engine.group.rank, outputs(engine, "bloom")


@pytest.mark.parametrize("deprecated", [False, True])
def test_an_mpu_brings_the_ranks(deprecated: bool, ranks: Ranks) -> None:
    results = ranks.run(4, by_mpu, deprecated)
    assert [result[:2] for result in results] == [(2, 0), (2, 0), (2, 1), (2, 1)]
    assert same([found for _, _, found in results])
    assert distance(results[0][2], outputs(BY_NAME["bloom"].make(), "bloom")) < TOLERANCE


def replicas() -> tuple[int, Tensor, Tensor]:
    engine = engine_of("llama", tensor_parallel={"tp_size": 2})
    given = inputs(BY_NAME["llama"], seed=dist.get_rank() // 2)  # each replica has work of its own
    with torch.no_grad():
        return engine.group.rank, engine(**given).logits, engine.generate(**given, max_new_tokens=5, do_sample=False)


def test_a_larger_world_holds_replicas(ranks: Ranks) -> None:
    results = ranks.run(4, replicas)
    assert [rank for rank, _, _ in results] == [0, 1, 0, 1]
    model: Any = BY_NAME["llama"].make()
    for number, replica in enumerate((results[:2], results[2:])):
        given = inputs(BY_NAME["llama"], seed=number)
        with torch.no_grad():
            logits, tokens = model(**given).logits, model.generate(**given, max_new_tokens=5, do_sample=False)
        assert all(distance(found, logits) < TOLERANCE and torch.equal(drawn, tokens) for _, found, drawn in replica)


UNEVEN = [
    ("llama", {"vocab_size": 97}),
    ("gpt2", {"vocab_size": 101}),
    ("llama-bias", {"vocab_size": 97}),
    ("llama", {"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 40}),
    ("gpt2", {"n_head": 3}),
    ("llama", {"intermediate_size": 83}),
    ("bloom", {"n_head": 6}),
]


def uneven(name: str, changes: dict) -> Tensor:
    engine = engine_of(name, changes, verify="sample")
    assert any(step.depth == "block" for step in engine.plan.steps), str(engine.plan)
    return outputs(engine, name)


@pytest.mark.parametrize(("name", "changes"), UNEVEN, ids=str)
def test_sizes_that_do_not_divide_give_the_outputs_of_one_rank(name: str, changes: dict, ranks: Ranks) -> None:
    size = 2 if UNEVEN.index((name, changes)) % 2 else 3
    found = ranks.run(size, uneven, name, changes)
    assert same(found) and distance(found[0], outputs(BY_NAME[name].make(**changes), name)) < TOLERANCE


def in_bfloat16() -> tuple[int, Tensor]:
    family = BY_NAME["llama"]
    model = family.make().to(torch.bfloat16)
    engine = infuse.init_inference(
        model, dtype="fp32", progress=False, tensor_parallel={"tp_size": dist.get_world_size()}
    )
    return sum(step.depth == "block" for step in engine.plan.steps), outputs(engine, "llama")


def test_a_model_in_bfloat16_is_proven_in_float32_by_all_ranks(ranks: Ranks) -> None:
    results = ranks.run(2, in_bfloat16)
    wanted = outputs(BY_NAME["llama"].make().to(torch.bfloat16).float(), "llama")
    assert all(blocks == 3 and distance(found, wanted) < TOLERANCE for blocks, found in results)


# ---- ranks that die ----


class Dies:
    """A streamer that kills the process of a rank at the fourth token."""

    def __init__(self, victim: int) -> None:
        self.victim, self.tokens = victim, 0

    def put(self, value: Tensor) -> None:
        self.tokens += 1
        if self.tokens == 4 and dist.get_rank() == self.victim:
            os.kill(os.getpid(), signal.SIGKILL)

    def end(self) -> None:
        pass


def killed_while_it_generates(victim: int) -> str:
    meet_through(keeper=0)
    engine = engine_of("llama")
    one = {name: value[:1] for name, value in inputs(BY_NAME["llama"]).items()}
    engine.generate(**one, max_new_tokens=4, do_sample=False)
    with pytest.raises(infuse.RankError) as caught:
        engine.generate(**one, max_new_tokens=100, do_sample=False, streamer=Dies(victim))
    with pytest.raises(infuse.RankError, match="the process group failed earlier"):
        engine(one["input_ids"])
    return str(caught.value)


@pytest.mark.parametrize("victim", [1, 0])
def test_a_rank_that_is_killed_while_it_generates_ends_the_others(victim: int, ranks: Ranks) -> None:
    """Rank 0 keeps the store of torch.distributed, too. No rank waits for the timeout of 300 s."""
    found = ranks.run_expecting_errors(3, killed_while_it_generates, victim, timeout=120)
    assert isinstance(found[victim], RankDied)
    for rank in {0, 1, 2} - {victim}:
        assert isinstance(found[rank], str), found[rank]
        assert f"rank {rank} of 3" in found[rank] and f"the process of rank {victim} has ended" in found[rank]


# ---- two hosts: two network namespaces ----

ACROSS = """
import ctypes, os, sys
namespace = os.open("/run/netns/{name}", os.O_RDONLY)
assert ctypes.CDLL(None, use_errno=True).setns(namespace, 0x40000000) == 0, os.strerror(ctypes.get_errno())
sys.path.insert(0, {root!r})
import torch
from tests.models.families import BY_NAME
from tests.support.checkpoints import outputs
import infuse

torch.set_num_threads(1)
engine = infuse.init_inference(BY_NAME["llama"].make(), dtype="fp32", progress=False, tensor_parallel={{"tp_size": 2}})
torch.save(outputs(engine, "llama"), {folder!r} + "/{rank}.pt")
"""


def shell(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{command}: {done.stderr.strip() or done.stdout.strip()}")


@pytest.fixture
def hosts() -> Any:
    """Two network namespaces with an address each, joined by a cable."""
    if not shutil.which("ip"):
        pytest.skip("no `ip` here to make network namespaces with")
    mark = f"if{os.getpid()}"
    names = (f"{mark}a", f"{mark}b")
    try:
        try:
            for name in names:
                shell(f"ip netns add {name}")
            shell(f"ip link add {names[0]} netns {names[0]} type veth peer name {names[1]} netns {names[1]}")
            for number, name in enumerate(names, 1):
                shell(f"ip -n {name} addr add 10.231.7.{number}/24 dev {name}")
                for link in ("lo", name):
                    shell(f"ip -n {name} link set {link} up")
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield [(name, f"10.231.7.{number}") for number, name in enumerate(names, 1)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.slow
def test_ranks_on_two_addresses(hosts: list[tuple[str, str]], tmp_path: Path) -> None:
    meeting = {"MASTER_ADDR": hosts[0][1], "MASTER_PORT": "29411", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    started = []
    for rank, (name, _) in enumerate(hosts):
        own = {"RANK": str(rank), "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": name, "PYTHONPATH": str(ROOT)}
        script = ACROSS.format(name=name, rank=rank, root=str(ROOT), folder=str(tmp_path))
        started.append(Program("-c", script, folder=tmp_path, environment=os.environ | meeting | own))
    ended = []
    try:
        ended = [process.communicate(timeout=240)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(process.returncode == 0 for process in started), ended
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert same(found) and distance(found[0], outputs(BY_NAME["llama"].make(), "llama")) < TOLERANCE
