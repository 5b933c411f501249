"""Loading takes the memory of the result and of one layer: measured by the system, in a process of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[3]
SHAPE = dict(
    hidden_size=768,
    intermediate_size=2048,
    num_attention_heads=8,
    num_key_value_heads=8,
    vocab_size=2048,
    num_hidden_layers=7,
)
SMALL = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=1)
MB = 1e6
# What a load takes beside tensors: torch's own code and workspaces, and memory that is free but not given back yet.
SPARE_BYTES = 12 * MB

# Imports everything once; each load is in a fork of its own, and those of ranks run at once.
LOADS = """
import json, os, sys, traceback
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import infuse, infuse.deepspeed as deepspeed
from infuse.plan.bytes import parameter_bytes

torch.set_num_threads(1)
loads, shape, small = (json.loads(text) for text in sys.argv[1:])

def empty(**shape):
    with deepspeed.OnDevice("bf16", device="meta"):
        return LlamaForCausalLM(LlamaConfig(**shape)).eval()

def status(key):  # of this process alone: getrusage starts at what the parent had
    return int(open("/proc/self/status").read().split(key + ":")[1].split()[0]) * 1024

def measure(path, keys):  # what is set up at the first use, is, by the small model
    infuse.init_inference(empty(**{**shape, **small}), checkpoint=path + "/small", progress=False, **keys)
    model = empty(**shape)
    before = status("VmRSS")
    engine = infuse.init_inference(model, checkpoint=path, progress=False, **keys)
    peak = status("VmHWM")
    assert sum(step.depth == "block" for step in engine.plan.steps) == shape["num_hidden_layers"], str(engine.plan)
    return {"peak": peak - before, "result": parameter_bytes(engine.module)}

for path, keys, environments in loads:
    ends = []
    for environment in environments:
        reading, writing = os.pipe()
        if not os.fork():
            os.environ.update(environment)
            try:
                os.write(writing, json.dumps(measure(path, keys)).encode())
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        os.close(writing)
        ends.append(reading)
    print(json.dumps([json.loads(os.read(end, 1000)) for end in ends]))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of 7 layers in bfloat16, 14.2 MB each, in two forms."""
    paths = {form: tmp_path_factory.mktemp(form) for form in ("safetensors", "bin")}
    for shape, part in ((SHAPE, "."), ({**SHAPE, **SMALL}, "small")):
        with torch.device("meta"):
            shapes = {
                name: tensor.shape for name, tensor in LlamaForCausalLM(LlamaConfig(**shape)).state_dict().items()
            }
        state = {
            name: (torch.randn(shape) * 0.02 if len(shape) > 1 else torch.ones(shape)).bfloat16()
            for name, shape in shapes.items()
        }
        for path in paths.values():
            (path / part).mkdir(exist_ok=True)
        save_file(state, paths["safetensors"] / part / "model.safetensors")
        torch.save(state, paths["bin"] / part / "pytorch_model.bin")
    return paths


LAYER_BYTES = 2 * (4 * SHAPE["hidden_size"] ** 2 + 3 * SHAPE["hidden_size"] * SHAPE["intermediate_size"])
# The form, the keys, how many ranks there are.
CASES = [("safetensors", {}, 1), ("bin", {}, 1), ("safetensors", {"quant": "int4"}, 1), ("safetensors", {}, 2)]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


@pytest.fixture(scope="module")
def measured(folders: dict[str, Path]) -> list[list[dict[str, int]]]:
    """What each rank of each case takes while it loads, in bytes."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(listener.getsockname()[1])}
    loads = []
    for form, keys, ranks in CASES:
        world = {"WORLD_SIZE": str(ranks), **address} if ranks > 1 else {}
        keys = {"dtype": "bf16", "tensor_parallel": {"tp_size": ranks}, **keys}
        loads.append(
            (str(folders[form]), keys, [world | {"RANK": str(rank)} if world else {} for rank in range(ranks)])
        )
    # With a fixed threshold the C library gives freed tensors back at once; else it keeps up to some 40 MB for later.
    # oneDNN keeps the code of the products that the proof ran, on processors with AMX 10 MB of it.
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": str(1 << 17),
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0",
        "INFUSE_RECEIPTS": "1",
        "INFUSE_CACHE_DIR": str(folders["bin"] / "cache"),
    }
    command = [sys.executable, "-c", LOADS, *map(json.dumps, (loads, SHAPE, SMALL))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()[-len(CASES) :]]


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{form}-{keys}-{ranks}" for form, keys, ranks in CASES])
def test_peak_memory_is_the_result_and_one_layer(case: int, measured: list[list[dict[str, int]]]) -> None:
    parameters = 7 * LAYER_BYTES + 2 * 2 * SHAPE["vocab_size"] * SHAPE["hidden_size"]
    ranks = CASES[case][2]
    assert len(measured[case]) == ranks
    for found in measured[case]:
        in_mb = {name: value / MB for name, value in (found | {"layer": LAYER_BYTES}).items()}
        assert found["result"] > 20 * MB and found["peak"] > 0.9 * found["result"], in_mb  # it measures
        assert ranks == 1 or found["result"] < 0.51 * parameters, in_mb
        assert found["peak"] <= found["result"] + LAYER_BYTES + SPARE_BYTES, in_mb
