"""The GPU benchmark from start to end on a CPU: tiny shapes, a recorder in the place of graphs, every table and every
figure there.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import transformers

from tests.support.forked import Program

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))  # its programs import each other as they lie there

import infuse  # noqa: E402
from on_gpu import diffusion as gpu_diffusion  # noqa: E402
from on_gpu import models as gpu_models  # noqa: E402
from on_gpu.runs import Bounds, Budget, read_bytes  # noqa: E402


def benchmark(*arguments: str) -> tuple[int | None, str]:
    """The exit code of bench/gpu.py in a process of its own, and what it says on standard error."""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "bench")))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    program = Program(str(ROOT / "bench/gpu.py"), *arguments, folder=ROOT, environment=environment)
    err = program.communicate(timeout=500)[1]
    return program.returncode, err


@pytest.mark.slow
def test_from_start_to_end(tmp_path: Path) -> None:
    out = tmp_path / "results" / "gpu.md"
    done, err = benchmark("--dry-run", "--out", str(out))
    assert done == 0 and "no CUDA graph" not in err, err[-3000:]
    found = json.loads(out.with_suffix(".json").read_text())
    rows = {(row["model"], row["who"], row["what"]) for row in found["rows"]}
    ours = {f"infuse {format}" for format in ("bfloat16", "int8", "int4", "fp8")}
    for model in ("Llama-3-8B", "Llama-3.2-1B"):
        for what in ("decode, batch 1", "decode, batch 2", "prefill 16"):
            assert {who for m, who, w in rows if (m, w) == (model, what)} >= {gpu_models.EAGER, *ours}
        assert (model, gpu_models.COMPILED, "decode, batch 1") in rows
    assert ("GPT-2-XL", "infuse bfloat16", "decode, batch 1") in rows and ("BERT-large", "infuse", "1 x 16") in rows
    for who in (gpu_diffusion.EAGER, "infuse"):
        assert ("SD 1.5 UNet, 64 x 64", who, "a step, 2 rows") in rows
    assert ("Qwen3.5-1B", "infuse bfloat16", "decode, batch 1") in rows
    for who, what in product((gpu_models.EAGER, "infuse"), ("until the first token", "a later token")):
        assert ("t5-base", who, what) in rows
    assert all(row["seconds"] > 0 and row["ratio"] > 0 for row in found["rows"])
    without = {(row["model"], row["what"]) for row in found["rows"] if not row["share"]}
    assert without == {
        ("Qwen3.5-1B", "prefill 16"), ("t5-base", "until the first token"), ("t5-base", "a later token"),
    }  # fmt: skip
    formats = ("bfloat16", "int8", "int4", "fp8")
    shown = {f"{model}, {of}" for model in ("Llama-3-8B", "Llama-3.2-1B", "Qwen3.5-1B") for of in formats}
    assert set(found["matrices"]) == shown
    in_prompts = {f"{who}: kernels of a prompt" for who in shown if who.endswith("bfloat16")}
    assert set(found["kernels"]) == in_prompts | {f"{who}: kernels of one step, batch 1" for who in shown}
    assert {matrix["kind"] for matrix in found["matrices"]["Llama-3-8B, int4"]} >= {"mlp.up", "mlp.down", "lm_head"}
    assert found["read_bytes_per_second"] > 0 and found["matmul_operations_per_second"] > 0 and not found["skipped"]
    assert found["versions"]["infuse"] == infuse.__version__ and "nothing here is a measurement" in found["device"]
    text = out.read_text()
    assert "Llama-3-8B, int8: kernels of one step" in text and "BERT-large" in text and "GPU tests: " in text
    assert found["tests"]["exit"] in (0, 5), "the GPU tests can be collected"


@pytest.mark.slow
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    done, err = benchmark("--out", str(tmp_path / "gpu.md"))
    assert done == 1 and "needs an NVIDIA GPU" in err


def test_what_a_step_reads() -> None:
    """All weights, but of an embedding that is not the head's: 15.0 GB of the 8B shape in bfloat16, 2.47 GB of the 1B
    shape.
    """
    for shape, expected in ((gpu_models.LLAMA_8B, 15.0e9), (gpu_models.LLAMA_1B, 2.47e9)):
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).bfloat16()
        if not model.config.tie_word_embeddings:  # on meta all lie at one place
            model.get_input_embeddings().weight = torch.nn.Parameter(torch.zeros(128256, 4096, dtype=torch.bfloat16))
        assert abs(read_bytes(model) - expected) < 0.02e9


def test_operations_of_a_prompt() -> None:
    """By hand for two layers of width 8, two heads of which one for keys, inner width 12, 3 tokens."""
    config = transformers.LlamaConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=12,
        vocab_size=7,
    )
    matrices = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 12
    assert gpu_models.prefill_operations(config, 3) == 2 * 3 * 2 * matrices + 2 * 2 * 2 * 2 * 4 * 9 / 2
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**gpu_models.LLAMA_8B))
    layers = sum(p.numel() for p in model.model.layers.parameters() if p.dim() == 2)
    attention = gpu_models.prefill_operations(model.config, 2048) - 2 * 2048 * layers
    assert attention == 2 * 2 * 32 * 4096 * 2048**2 / 2


def test_the_budget() -> None:
    budget = Budget(100)
    assert budget.allows("a", 50) and not budget.allows("b", 500)
    assert len(budget.skipped) == 1 and budget.skipped[0].startswith("b (needs 500 s")
    assert "4.30 TB/s" in str(Bounds(4.3e12, 790e12)) and "790 TFLOP/s" in str(Bounds(4.3e12, 790e12))
