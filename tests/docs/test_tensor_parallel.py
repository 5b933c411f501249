"""The examples of docs/tensor_parallel.md: the script under torchrun, the commands, and the blocks of code on ranks of
the pool.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.forked import Program
from tests.support.ranks import Ranks

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "tensor_parallel.md").read_text(encoding="utf-8")
PROGRAMS = {"torchrun": ["-m", "torch.distributed.run", "--standalone"], "infuse": ["-m", "infuse_cli.app"]}


def blocks() -> list[str]:
    """Every indented block, in order."""
    paragraphs = re.findall(r"(?:^(?:    .*)?\n)+", TEXT, flags=re.MULTILINE)
    return [code for paragraph in paragraphs if (code := textwrap.dedent(paragraph).strip())]


def sections() -> dict[str, list[str]]:
    """The blocks of code of each section: no script, no command, no drawing, no message."""
    found: dict[str, list[str]] = {}
    for section in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]:
        paragraphs = re.findall(r"(?:^(?:    .*)?\n)+", section, flags=re.MULTILINE)
        codes = [textwrap.dedent(paragraph).strip() for paragraph in paragraphs]
        found[section.partition("\n")[0]] = [
            code for code in codes if "infuse." in code and not code.startswith(("#", "$"))
        ]
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(ROOT / "examples" / "tiny_llama", tmp_path / "tiny_llama")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_script_and_the_commands_run(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained("tiny_llama")
    model: Any = AutoModelForCausalLM.from_pretrained("tiny_llama", dtype=torch.float32)
    ids = model.generate(
        **tokenizer("def add(", return_tensors="pt", return_token_type_ids=False), max_new_tokens=12, do_sample=False
    )
    (script,) = [code for code in blocks() if code.startswith("# script.py")]
    (folder / "script.py").write_text(script)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = str(ROOT)
    printed = []
    for line in (line[2:] for code in blocks() for line in code.splitlines() if line.startswith("$ ")):
        program, *arguments = shlex.split(line)
        command = [str(ROOT / "tests" / "support" / "launcher.py"), *PROGRAMS[program], *arguments]
        done = Program(*command, folder=folder, environment=environment, daemon=False)
        out, err = done.communicate(timeout=240)
        assert done.returncode == 0 and "refused" not in err, f"{line}\n{err[-3000:]}"
        printed.append(out)
    script_text, generated, plan, shard = printed
    assert script_text.strip() == tokenizer.decode(ids[0]).strip()
    assert "def add(" + generated.rstrip("\n") == tokenizer.decode(ids[0], skip_special_tokens=True).rstrip("\n")
    assert (
        "rank 0 of 2" in plan and "rank 0 of 2" in shard and (folder / "shards" / "rank-01-of-02.safetensors").is_file()
    )


def on_rank(folder: str, codes: list[str]) -> list[int]:
    """Run a section's code; the sizes of the groups that its engines had."""
    os.chdir(folder)

    def fresh() -> Any:
        return AutoModelForCausalLM.from_pretrained("tiny_llama", dtype=torch.float32)

    import infuse

    sizes = []
    for code in codes:
        names: dict[str, Any] = {"infuse": infuse, "torch": torch, "model": fresh(), "other": fresh()}
        exec(compile(code, "docs/tensor_parallel.md", "exec"), names)
        if "engine" in names:
            assert any(step.depth == "block" for step in names["engine"].plan.steps)
            sizes.append(names["engine"].group.size)
    return sizes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "size", "count"),
    [("What is split, and how", 2, 0), ("When a rank fails", 2, 1), ("Which ranks", 4, 1), ("Shards", 2, 1)],
)
def test_the_code_runs_on_ranks(section: str, size: int, count: int, folder: Path, ranks: Ranks) -> None:
    codes = ["\n\n".join(sections()[section])]
    assert codes[0] and ranks.run(size, on_rank, str(folder), codes) == [[2] * count] * size
    assert (section == "Shards") == (folder / "shards" / "infuse.json").is_file()


def test_every_block_is_run() -> None:
    run = [code for codes in sections().values() for code in codes]
    left = [code for code in blocks() if code not in run and not code.startswith(("# script.py", "$ "))]
    assert len(run) == 4 and [code.partition("\n")[0][:12] for code in left] == ["x  (the same", "RankError: r"], left
