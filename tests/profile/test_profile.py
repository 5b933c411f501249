"""The engine's report, the times of forwards, and profiles as dict, table and Chrome trace."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

import infuse
from infuse.profile import profiler
from tests.models.families import BY_NAME, inputs
from tests.support.side_by_side import ids, injected

# ---- the report ----


def test_report_before_and_after_work() -> None:
    engine = injected(BY_NAME["llama"].make())
    before = engine.report()
    linears = len(engine.plan.steps) - 3  # the head, where there are kernels for linears
    assert linears <= 1 and f"3 blocks and {linears} linears replaced" in before
    assert str(engine.plan) in before and "MB before" in before
    assert "tokens/s" not in before
    with engine.profile():
        engine.generate(ids(1, 5), max_new_tokens=3)
    after = engine.report()
    assert after.startswith(before) and "decode tokens/s" in after and "3 forwards in" in after


def test_memory_in_the_report_is_what_is_held() -> None:
    model = BY_NAME["llama"].make()
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    engine = infuse.init_inference(model, dtype="bf16")
    now = sum(tensor.nbytes for tensor in (*engine.module.parameters(), *engine.module.buffers()))
    assert (engine.plan.before_bytes, engine.plan.after_bytes) == (held, now) and now < 0.6 * held


# ---- the times of forwards ----


def test_model_times_are_milliseconds_of_each_forward_and_are_read_once() -> None:
    engine = injected(BY_NAME["llama"].make())
    engine(ids(1, 4))  # before profiling: not counted
    engine.profile_model_time(use_cuda_events=False)
    engine.profile_model_time()  # twice does not count twice
    engine.module.register_forward_pre_hook(lambda module, args: time.sleep(0.02))
    start = time.perf_counter()
    engine(ids(1, 4))
    engine.module(ids(1, 4))
    engine.generate(ids(1, 4), max_new_tokens=3)
    spent_ms = (time.perf_counter() - start) * 1e3
    times = engine.model_times()
    assert len(times) == 5 and min(times) >= 20 and sum(times) <= spent_ms
    assert engine.model_times() == []
    engine(ids(1, 4))
    assert len(engine.model_times()) == 1


def test_model_times_without_profiling_is_an_error() -> None:
    engine = injected(BY_NAME["llama"].make())
    with pytest.raises(infuse.InfuseError, match=r"profile_model_time\(\)"):
        engine.model_times()
    engine.profile_model_time()
    assert engine.model_times() == []
    engine.destroy()
    with pytest.raises(infuse.InfuseError, match=r"profile_model_time\(\)"):
        engine.model_times()


def test_a_forward_that_fails_disturbs_no_later_time() -> None:
    engine = injected(BY_NAME["llama"].make())
    engine.profile_model_time()
    with pytest.raises(IndexError):
        engine(torch.tensor([[1000]]))  # beyond the vocabulary
    engine.model_times()
    engine.module.register_forward_pre_hook(lambda module, args: time.sleep(0.02))
    engine(ids(1, 4))
    (spent,) = engine.model_times()
    assert spent >= 20


# ---- profiles ----


@pytest.fixture(autouse=True)
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a profile compares with costs more than all else in full size."""
    monkeypatch.setattr(profiler, "_PROBE_BYTES", 1 << 24)


def test_profile() -> None:
    engine = injected(BY_NAME["llama"].make())
    with engine.profile() as profile:
        exact = engine.generate(ids(2, 5), max_new_tokens=4)
    assert torch.equal(exact, BY_NAME["llama"].make().generate(ids(2, 5), max_new_tokens=4))
    found = profile.as_dict()
    assert found["forwards"] == 4
    assert found["weight_bytes"] == sum(tensor.nbytes for tensor in (*engine.parameters(), *engine.buffers()))
    kinds = {row["kind"]: row for row in found["modules"]}
    assert kinds["LlamaDecoderLayer"]["calls"] == kinds["LlamaAttention"]["calls"] == 4 * 3
    assert kinds["LlamaForCausalLM"]["calls"] == 4
    assert sum(row["seconds"] for row in found["modules"]) <= found["seconds"]
    assert any("mm" in row["op"] for row in found["ops"])
    for rows in (found["modules"], found["ops"]):
        seconds = [row["seconds"] for row in rows]
        assert seconds == sorted(seconds, reverse=True) and min(seconds) >= 0 and all(row["calls"] > 0 for row in rows)
    forward_seconds = sum(row["seconds"] for row in found["modules"])
    assert found["decode_tokens_per_second"] >= 3 * 2 / forward_seconds
    assert found["prefill_tokens_per_second"] >= 2 * 5 / forward_seconds
    assert found["probed_bytes_per_second"] > 1e8
    assert found["share_of_bandwidth"] == pytest.approx(
        found["read_bytes_per_second"] / found["probed_bytes_per_second"]
    )
    json.dumps(found)


def test_profile_as_text_and_as_trace(tmp_path: Path) -> None:
    engine = injected(BY_NAME["gpt2"].make())
    with engine.profile() as profile:
        engine.generate(ids(1, 5), max_new_tokens=3)
    text = str(profile)
    for word in (
        "3 forwards in",
        "by module (own time)",
        "GPT2Block",
        "by op (own time)",
        "aten::",
        "decode tokens/s",
        "GB/s",
        "%",
    ):
        assert word in text, word
    profile.save_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = {event.get("name", "") for event in trace["traceEvents"]}
    assert any(name.startswith("aten::") for name in names)


def test_profile_of_an_encoder_has_no_decode() -> None:
    engine = injected(BY_NAME["bert"].make())
    with engine.profile() as profile:
        engine(**inputs(BY_NAME["bert"]))
    found = profile.as_dict()
    assert found["forwards"] == 1 and found["prefill_tokens_per_second"] > 0
    assert found["decode_tokens_per_second"] is None and found["share_of_bandwidth"] is None
    assert "decode tokens/s" not in str(profile)


def test_profiling_leaves_nothing_behind() -> None:
    engine = injected(BY_NAME["llama"].make())
    hooks = [dict(module._forward_hooks) for module in engine.modules()]
    with engine.profile():
        engine(ids(1, 4))
    with pytest.raises(IndexError), engine.profile():
        engine(torch.tensor([[1000]]))
    assert [dict(module._forward_hooks) for module in engine.modules()] == hooks
    with engine.profile() as profile:
        engine(ids(1, 4))
    assert profile.as_dict()["forwards"] == 1
