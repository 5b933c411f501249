"""`--tp` and `--ep`: commands that start ranks. Rank 0 prints what one process prints; an error is one message;
nothing is left behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import infuse
from infuse_cli import ranks
from infuse_cli.messages import fail
from tests.support.commands import PROMPT, run
from tests.support.forked import Program

ROOT = Path(__file__).parents[2]
GENERATE = ("--prompt", PROMPT, "--max-new-tokens", "12", "--dtype", "float32")


def environment() -> dict[str, str]:
    unset = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    return {name: value for name, value in os.environ.items() if name not in unset} | {"PYTHONPATH": str(ROOT)}


def start(*arguments: object) -> subprocess.Popen:
    """A command as a shell starts it."""
    command = [sys.executable, "-m", "infuse_cli.app", *map(str, arguments)]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def command(*arguments: object, code: int = 0) -> tuple[str, str]:
    """What a command prints, whose launcher and ranks are forks."""
    program = (str(ROOT / "tests" / "support" / "launcher.py"), "-m", "infuse_cli.app")
    process = Program(*program, *map(str, arguments), folder=ROOT, environment=environment(), daemon=False)
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
    return out, err


def test_plan_is_that_of_rank_0_and_starts_nothing(folder):  # noqa: F811
    out, _ = run("plan", folder, "--dtype", "float32", "--tp", 2)
    assert "rank 0 of 2" in out and "block" in out
    assert "too few for 8 ranks" in run("plan", folder, "--dtype", "float32", "--tp", 8)[0]


def test_what_is_wrong_is_told_before_ranks_are_started(folder, tmp_path):  # noqa: F811
    assert "--against with --tp" in run("bench", folder, "--against", "eager", "--tp", 2, code=2)[1]
    assert "does not exist" in run("generate", tmp_path / "nowhere", *GENERATE, "--tp", 2, code=2)[1]


@pytest.mark.slow
def test_ranks_shard_and_generate_what_one_process_generates(folder, tmp_path):  # noqa: F811
    wanted = run("generate", folder, *GENERATE)[0]
    out, err = command("shard", folder, tmp_path, "--dtype", "float32", "--tp", 2)
    assert "rank 0 of 2" in out and err.count("MB in") == 1 and "refused" not in err
    names = {"infuse.json", "rank-00-of-02.safetensors", "rank-01-of-02.safetensors"}
    assert set(os.listdir(tmp_path)) == (set(os.listdir(folder)) - {"model.safetensors"}) | names
    out, err = command("generate", tmp_path, *GENERATE, "--tp", 2)
    assert out == wanted and err.count("tokens/s") == 1 and "refused" not in err
    assert run("generate", tmp_path, *GENERATE)[0] == wanted
    # one rank's file is gone: one message, from whichever rank was heard
    (tmp_path / "rank-01-of-02.safetensors").unlink()
    out, err = command("generate", tmp_path, *GENERATE, "--tp", 2, code=1)
    assert (
        not out
        and err.count("error: ") == 1
        and "rank-01-of-02.safetensors" in err.replace("\n", "")
        and "Traceback" not in err
    )


@pytest.mark.slow
def test_bench_over_ranks(folder):  # noqa: F811
    out, _ = command(
        "bench", folder, "--prompt-tokens", 4, "--new-tokens", 4, "--repeats", 1, "--dtype", "float32", "--tp", 2
    )
    assert out.count("decode, tokens/s") == 1 and "bound" in out


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_ends_all_ranks(folder):  # noqa: F811
    process = start(
        "generate", folder, "--prompt", PROMPT, "--max-new-tokens", 100_000, "--dtype", "float32", "--tp", 2
    )
    try:
        assert process.stdout and process.stdout.read(1)  # the first of the text
        ranks = children(process.pid)
        assert len(ranks) == 2
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130 and err.count("error: ended by SIGINT") == 1 and "Traceback" not in err
    finally:
        process.kill()
    until = time.monotonic() + 60
    while time.monotonic() < until and any(Path(f"/proc/{pid}").exists() for pid in ranks):
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


# ---- mixtures


@pytest.fixture(scope="module")
def mixture(folder, tmp_path_factory):  # noqa: F811
    """A saved tiny Mixtral with the other folder's tokenizer."""
    path = tmp_path_factory.mktemp("mixture")
    for file in folder.glob("tokenizer*"):
        shutil.copyfile(file, path / file.name)
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=128, bos_token_id=None, eos_token_id=0,
        pad_token_id=0,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(path)
    return path


def test_plans_of_ranks_that_divide_experts(mixture):
    plan = ("plan", mixture, "--dtype", "float32")
    out = run(*plan, "--ep", 2)[0]
    assert "rank 0 of 2; experts on 2" in out and "2 of 4 experts on a rank" in out
    out = run(*plan, "--tp", 2, "--ep", 2)[0]
    assert "rank 0 of 4; experts on 2, each in 2 slices" in out
    assert "too few for 8 ranks" in run(*plan, "--ep", 8)[0]
    assert "--against with --ep" in run("bench", mixture, "--against", "eager", "--ep", 2, code=2)[1]


def test_ranks_of_experts_start_and_generate(mixture, monkeypatch):
    """How many ranks the options start, and what each of them is asked to do."""
    started, asked = [], []
    monkeypatch.setattr(ranks, "_launch", lambda size, command: started.append(size))
    for options, size in ((("--ep", 2), 2), (("--tp", 2, "--ep", 3), 6), (("--tp", 2), 2)):
        run("generate", mixture, *GENERATE, *options)
        assert started.pop() == size
    monkeypatch.setattr(infuse, "init_inference", lambda model, **keys: asked.append(keys) or fail("enough", 1))
    monkeypatch.setattr("infuse_cli.app.as_ranks", lambda size: True)
    run("generate", mixture, *GENERATE, "--tp", 2, "--ep", 3, code=1)
    assert asked[0]["tensor_parallel"] == {"tp_size": 2} and asked[0]["moe"] == {"ep_size": 3}
    assert asked[0]["checkpoint"] == str(mixture)  # each rank reads its own part


@pytest.mark.slow
def test_ranks_of_experts_shard_and_generate_what_one_process_generates(mixture, tmp_path):
    wanted = run("generate", mixture, *GENERATE)[0]
    out, err = command("shard", mixture, tmp_path, "--dtype", "float32", "--tp", 2, "--ep", 2)
    assert "rank 0 of 4" in out and "refused" not in err and len(list(tmp_path.glob("*.safetensors"))) == 4
    for options in (("--tp", 2, "--ep", 2), ()):
        assert command("generate", tmp_path, *GENERATE, *options)[0] == wanted
    _, err = command("generate", tmp_path, *GENERATE, "--ep", 2, code=1)
    assert "saved by its inputs and by experts, needed by its outputs" in err and "infuse shard MODEL_DIR OUT" in err
