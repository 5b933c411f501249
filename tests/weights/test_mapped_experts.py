"""Experts mapped from our shards: the values of experts in memory, read when they are first used, for large models."""

from __future__ import annotations

import copy
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import infuse
from infuse import ops
from infuse.config.inference import InferenceConfig
from infuse.ground.device import Device
from infuse.ground.errors import CheckpointError, ConfigError
from infuse.layers.mixture.experts import Experts, mapped_bytes
from infuse.plan.decide import make_plan
from tests.support.forked import Program
from tests.support.mapped_experts import MMAP, loaded, logits, model, with_kernels
from tests.support.ranks import Ranks


@pytest.fixture
def saved(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[infuse.InferenceEngine, Path]:
    """An engine and the folder of its shards, in the format that a test asks for."""
    quant = getattr(request, "param", "int8")
    given = dict(dtype="fp32", **({"quant": quant} if quant else {}))
    return infuse.init_inference(model(), save_mp_checkpoint_path=str(tmp_path), **{**MMAP, **given}), tmp_path


@with_kernels
@pytest.mark.parametrize("saved", [None, "int8", "int4:32:asymmetric", "fp6:32", "mxfp4"], indirect=True)
def test_the_same_values_as_in_memory(saved: tuple[infuse.InferenceEngine, Path], tmp_path: Path) -> None:
    engine, folder = saved
    mapped, read = loaded(folder), loaded(folder, experts="memory")
    matrices = [one for one in engine.module.modules() if hasattr(one, "first_use")]
    whole = sum(tensor.nbytes for one in matrices for tensor in (*one.parameters(), *one.buffers()))
    assert mapped_bytes(mapped.module) == mapped.plan.mapped_bytes == whole > 0
    assert mapped_bytes(read.module) == 0 and "of experts mapped" not in str(read.plan)
    assert f"{whole / 1e6:,.1f} MB of experts mapped from their file" in str(mapped.plan)
    assert torch.equal(logits(mapped), logits(engine)) and torch.equal(logits(read), logits(engine))
    copied = copy.deepcopy(mapped.module), pickle.loads(pickle.dumps(mapped.module))
    assert all(mapped_bytes(one) == 0 and torch.equal(logits(one), logits(engine)) for one in copied)
    again = tmp_path / "again"
    infuse.init_inference(model("meta"), checkpoint=str(folder), save_mp_checkpoint_path=str(again), **MMAP)
    assert torch.equal(logits(loaded(again)), logits(engine))


@with_kernels
def test_all_experts_of_all_tokens_are_checked_by_the_numbers_that_this_rank_has(saved: tuple[Any, Path]) -> None:
    experts = next(module for module in loaded(saved[1]).module.modules() if isinstance(module, Experts))
    asked: list[torch.Tensor] = []
    experts.up.first_use = experts.down.first_use = asked.append
    experts.shape = replace(experts.shape, gate=experts.shape.gate._replace(first=3))
    index = torch.tensor([[3, 5], [4, 10]])
    with torch.no_grad():
        experts(torch.randn(2, 64), index, torch.rand(2, 2))
    assert len(asked) == 2 and all(torch.equal(numbers, index - 3) for numbers in asked)


@with_kernels
def test_shards_in_rows_are_read_and_the_plan_says_why(tmp_path: Path) -> None:
    given = dict(dtype="fp32", quant="int8", verify="off")
    engine = infuse.init_inference(model(), save_mp_checkpoint_path=str(tmp_path), **given)
    again = loaded(tmp_path)
    assert mapped_bytes(again.module) == 0 and torch.equal(logits(again), logits(engine))
    assert "4 matrices of experts were read into memory" in str(again.plan)
    assert "stored in rows, and the kernel reads panels of 16 rows" in str(again.plan)


@with_kernels
def test_a_changed_file_is_named_and_never_written(saved: tuple[infuse.InferenceEngine, Path]) -> None:
    engine, folder = saved
    (file,) = folder.glob("*.safetensors")
    held = file.read_bytes()
    state = {name: torch.zeros_like(tensor) for name, tensor in model().state_dict().items()}
    written = loaded(folder)
    logits(written)
    written.module.load_state_dict(state)  # writes in place
    assert float(logits(written).abs().max()) == 0 and file.read_bytes() == held
    deleted = loaded(folder)
    file.unlink()
    assert torch.equal(logits(deleted), logits(engine))  # the system keeps a mapped file
    with pytest.raises(CheckpointError, match="1 files are missing"):
        loaded(folder)
    matrix = engine.module.model.layers[1].mlp.experts.down
    at = held.index(bytes(matrix.data.flatten()[:64].view(torch.uint8).tolist()))
    file.write_bytes(held[:at] + bytes([held[at] ^ 1]) + held[at + 1 :])
    broken = loaded(folder)
    with pytest.raises(CheckpointError, match="layers.1.mlp.experts.down.data is not what was saved"):
        logits(broken)
    file.write_bytes(held)
    changed = loaded(folder)
    os.truncate(file, len(held) - 1)
    with pytest.raises(CheckpointError, match="was changed while its tensors were mapped"):
        logits(changed)


def test_what_cannot_be_mapped_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"save_mp_checkpoint_path=FOLDER.*checkpoint=FOLDER"):
        infuse.init_inference(model(), experts="mmap")
    model().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="not a folder of infuse's own shards"):
        loaded(tmp_path)
    with pytest.raises(ConfigError, match="possible: 'memory' or 'mmap'|'memory', 'mmap'"):
        infuse.init_inference(model(), experts="disk")
    gpu = Device("cuda", 0, "a GPU", (), 2**33, (torch.float32,))
    settings = InferenceConfig(dtype="fp32", experts="mmap", checkpoint=str(tmp_path))
    with pytest.raises(ConfigError, match='"mmap" on cuda a GPU; .* give device="cpu"'):
        make_plan(model("meta"), settings, gpu)


@with_kernels
def test_panels_without_kernels(saved: tuple[infuse.InferenceEngine, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without the kernels cannot read panels."""
    declining = replace(ops.quantized_experts.bodies["cpu"], needs=lambda device, dtype: "there are none")
    monkeypatch.setitem(ops.quantized_experts.bodies, "cpu", declining)
    for how in ("mmap", "memory"):
        with pytest.raises(CheckpointError, match="in panels of 16 rows, .* cannot run here: there are none"):
            loaded(saved[1], experts=how)


RESIDENT = """
import sys, torch, transformers, infuse
from infuse.layers.mixture.experts import Experts, mapped_bytes
from tests.support.mapped_experts import MMAP, logits, model
torch.set_num_threads(1)

def resident():
    return int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0]) * 1024

shape = dict(hidden_size=256, intermediate_size=512, num_local_experts=40)
logits(infuse.init_inference(model(), **{**MMAP, "experts": "memory"}))  # what is set up at the first use
empty, before = model("meta", **shape), resident()
engine = infuse.init_inference(empty, checkpoint=sys.argv[1], **MMAP)
print(resident() - before, mapped_bytes(engine.module))
"""


@with_kernels
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_mapped_experts_take_no_memory_after_load(tmp_path: Path) -> None:
    given = dict(hidden_size=256, intermediate_size=512, num_local_experts=40)
    infuse.init_inference(model(**given), dtype="bf16", quant="int8", save_mp_checkpoint_path=str(tmp_path), **MMAP)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    program = Program("-c", RESIDENT, str(tmp_path), folder=tmp_path, environment=environment)
    out, err = program.communicate(timeout=120)
    assert program.returncode == 0, err[-3000:]
    taken, mapped = map(int, out.split()[-2:])
    assert mapped > 30e6 and taken < mapped / 3


def saved_by_ranks(folder: str, keys: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """What the engine that saves gives, what one gives that maps its shards, and how many bytes this rank maps."""
    given = dict(dtype="fp32", quant="int8:32", save_mp_checkpoint_path=folder)
    first = infuse.init_inference(model(), **{**MMAP, **keys, **given})
    second = loaded(Path(folder), **keys)
    return logits(first), logits(second), mapped_bytes(second.module)


@with_kernels
@pytest.mark.parametrize("way", ["experts", "slices"])
def test_ranks_map_their_own_files(way: str, ranks: Ranks, tmp_path: Path) -> None:
    keys = {"moe": {"ep_size": 2}} if way == "experts" else {"tensor_parallel": {"tp_size": 2}}
    for wanted, found, mapped in ranks.run(2, saved_by_ranks, str(tmp_path), keys):
        assert torch.equal(found, wanted) and mapped > 0
    if way == "slices":
        with pytest.raises(CheckpointError, match="panels of 16 rows, and .* would cut these"):
            loaded(tmp_path)
        return
    alone = loaded(tmp_path)
    assert "the ranks that saved it cut it otherwise" in str(alone.plan)
    torch.testing.assert_close(logits(alone), wanted, rtol=0, atol=1e-5)
