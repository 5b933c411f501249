"""The benchmark of the ops: every op is timed on its cases, and Llama's arguments are what the ops take."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from infuse.ops import registered

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))  # its programs import each other as they lie there

import llama_cases  # noqa: E402
import moe  # noqa: E402
import ops as bench_ops  # noqa: E402


def test_operations_are_counted() -> None:
    ops = registered()
    x, weight = torch.zeros(3, 8), torch.zeros(5, 8)
    assert bench_ops.operations(ops["linear"], (x, weight, None)) == 2 * 3 * 8 * 5
    q, k = torch.zeros(1, 2, 3, 4), torch.zeros(1, 1, 5, 4)
    # Both products, 2 heads, width 4; causal: the queries see 3, 4 and 5 keys.
    assert bench_ops.operations(ops["attention"], (q, k, k, None, None, 1.0, True, 0, 0.0)) == 2 * 2 * 2 * 4 * (
        3 + 4 + 5
    )
    assert bench_ops.operations(ops["rms_norm"], (x, None, 1e-6, 0.0)) == 0


def test_bytes_are_those_of_arguments_and_results() -> None:
    ops = registered()
    x, weight = torch.zeros(3, 8), torch.zeros(5, 8)
    case = bench_ops.Case("", (x, weight, None))
    assert bench_ops.moved_bytes(ops["linear"], case) == 4 * (3 * 8 + 5 * 8 + 3 * 5)
    (first, *_) = llama_cases.rotary_append(torch.bfloat16)
    heads = llama_cases.HEADS + 2 * llama_cases.KV_HEADS
    assert bench_ops.moved_bytes(ops["rotary_append"], first) == 2 * llama_cases.WIDTH * (2 * heads + 2)


def test_a_step_reads_the_experts_that_its_rows_hit() -> None:
    shape, embedding = moe.SHAPES["small"], 32000 * 1024 * 2
    entry = moe.Contestant("transformers bf16", None, torch.bfloat16, 10**10, 0.0)
    expert, cached = 3 * 1024 * 512 * 2, 2 * 12 * 4 * 64 * 100 * 2
    assert moe.step_bytes(shape, entry, 1, 100) == 10**10 - embedding - 12 * 24 * expert + cached
    assert moe.step_bytes(shape, entry, 10**4, 0) == pytest.approx(10**10 - embedding)


def test_the_bytes_of_llama_cpp_are_those_of_its_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, embedding = moe.SHAPES["small"], 32000 * 1024 * 2
    entry = moe.Contestant("llama.cpp Q4_0", None, torch.bfloat16, 10**10, 0.0)
    missed, cached = 12 * 24 * 3 * 1024 * 512 * 18 / 32, 2 * 12 * 4 * 64 * 100 * 2
    assert moe.step_bytes(shape, entry, 1, 100) == 10**10 - embedding - missed + cached
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert moe.missing() == "llama.cpp is left out, without the packages llama_cpp and gguf"


@pytest.mark.parametrize("name", sorted(registered()))
def test_ops_take_the_arguments_of_llama(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name not in llama_cases.LLAMA_CASES:
        pytest.skip("not an op of this model's layers")
    monkeypatch.setattr(llama_cases, "MATRICES", {"qkv": (64, 96), "lm_head": (64, 128)})
    monkeypatch.setattr(llama_cases, "CONTEXTS", ((1, 1, 8), (2, 3, 8)))
    monkeypatch.setattr(llama_cases, "ROWS", (1, 3))
    cases = list(llama_cases.LLAMA_CASES[name](torch.float32))
    assert cases and len({case.label for case in cases}) == len(cases)
    for case in cases:
        registered()[name](*case.args)


def test_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results" / "ops.md"
    arguments = ["bench/ops.py", "--op", "rotary", "--set", "cases", "--repeats", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(bench_ops, "COLD_BYTES", 1 << 20)
    # In full size these cost more than all else.
    monkeypatch.setattr(bench_ops, "matmul_rate", partial(bench_ops.matmul_rate, n=64))
    monkeypatch.setattr(bench_ops, "read_bandwidth", partial(bench_ops.read_bandwidth, size_bytes=1 << 22, repeats=2))
    for _ in range(2):
        bench_ops.main()
    assert out.read_text().count("probed: read") == 2 == out.read_text().count("--op rotary")
    told = capsys.readouterr().out
    for body in set(registered()["rotary"].bodies) - {"triton"}:  # which no CPU runs
        if body != "cpu" or "kernels: none" not in told:
            assert f" {body} " in told, body
