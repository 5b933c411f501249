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

ROOT = Path(__file__).parent.parent
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

LOAD = """
import json, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import infuse, infuse.deepspeed as deepspeed
from infuse.plan.bytes import parameter_bytes

torch.set_num_threads(1)
path, keys, shape = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])

def empty(**shape):
    with deepspeed.OnDevice("bf16", device="meta"):
        return LlamaForCausalLM(LlamaConfig(**shape)).eval()

def status(key):  # of this process alone: getrusage starts at what the parent had
    return int(open("/proc/self/status").read().split(key + ":")[1].split()[0]) * 1024

small = empty(**{**shape, **json.loads(sys.argv[4])})  # what is set up at the first use, is
infuse.init_inference(small, checkpoint=path + "/small", progress=False, **keys)
model = empty(**shape)
before = status("VmRSS")
engine = infuse.init_inference(model, checkpoint=path, progress=False, **keys)
peak = status("VmHWM")
assert sum(step.depth == "block" for step in engine.plan.steps) == shape["num_hidden_layers"], str(engine.plan)
print(json.dumps({"before": before, "peak": peak - before, "after": status("VmRSS") - before, \
"result": parameter_bytes(engine.module)}))
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
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


def measured(folder: Path, keys: dict, ranks: int = 1) -> list[dict[str, int]]:
    """What a load takes in each of `ranks` processes, in bytes."""
    shapes = (json.dumps(values) for values in ({"dtype": "bf16", **keys}, SHAPE, SMALL))
    command = [sys.executable, "-c", LOAD, str(folder), *shapes]
    # With a fixed threshold the C library gives freed tensors back at once; else it keeps up to some 40 MB for later.
    # oneDNN keeps the code of the products that the proof ran, on processors with AMX 10 MB of it.
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": str(1 << 17),
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0",
    }
    if ranks > 1:
        with socket.socket() as listener:
            listener.bind(("localhost", 0))
            port = listener.getsockname()[1]
        environment |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started = [subprocess.Popen(command, **pipes, env={**environment, "RANK": str(rank)}) for rank in range(ranks)]
    found = []
    for process in started:
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err[-3000:]
        found.append(json.loads(out.splitlines()[-1]))
        in_mb = {name: value / MB for name, value in (found[-1] | {"layer": LAYER_BYTES}).items()}
        assert found[-1]["peak"] > 0.9 * found[-1]["result"], in_mb  # it measures
        assert found[-1]["peak"] <= found[-1]["result"] + LAYER_BYTES + SPARE_BYTES, in_mb
    return found


@pytest.mark.parametrize(
    ("form", "keys"), [("safetensors", {}), ("bin", {}), ("safetensors", {"quant": "int4"})], ids=str
)
def test_peak_memory_is_the_result_and_one_layer(form: str, keys: dict, folders: dict[str, Path]) -> None:
    (found,) = measured(folders[form], keys)
    assert found["result"] > 20 * MB


def test_peak_memory_of_a_rank_is_its_part_and_one_layer(folders: dict[str, Path]) -> None:
    parameters = 7 * LAYER_BYTES + 2 * 2 * SHAPE["vocab_size"] * SHAPE["hidden_size"]
    for found in measured(folders["safetensors"], {"tensor_parallel": {"tp_size": 2}}, ranks=2):
        assert found["result"] < 0.51 * parameters
