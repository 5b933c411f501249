"""The examples of docs/checkpoints.md, run as they stand."""

from __future__ import annotations

import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from infuse.quant.parse import quant_format

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")


def examples() -> list[tuple[str, str]]:
    """(heading, code) for each section that has code."""
    found = []
    for section in re.split(r"^#+ ", TEXT, flags=re.MULTILINE)[1:]:
        lines = [line if line.startswith("    ") else "" for line in section.splitlines()]
        code = textwrap.dedent("\n".join(lines)).strip()
        if code:
            found.append((section.partition("\n")[0], code))
    return found


@pytest.mark.slow
def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    shutil.copytree(ROOT / "examples" / "tiny_llama", tmp_path / "tiny_llama")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    ids = torch.arange(5, 15)[None]
    results = {}
    for heading, code in examples():
        exec(compile(code, heading, "exec"), names)
        if "engine" in names:
            with torch.no_grad():
                results[heading] = names["engine"](ids).logits.float()
    assert len(results) == 8
    wanted = results["A live model"]
    for heading, found in results.items():
        assert ((found - wanted).norm() / wanted.norm()) < (0.2 if heading == "Our own shards" else 0.02), heading
    with torch.no_grad():
        assert torch.equal(results["Our own shards"], names["saving"](ids).logits.float())
    assert "the checkpoint (the description) is not this model's: " in capsys.readouterr().out


def test_the_bits_of_quantized_forms_are_those_of_the_formats() -> None:
    rows = re.findall(r"^\|[^|]*\| [^|]+ \| ([^|]+) \| ([\d., ]+) \| ([\d.]+) \|$", TEXT, re.MULTILINE)
    assert len(rows) == 36
    for text, _, bits in rows:
        format = quant_format(text.strip("`"))
        assert float(bits) == pytest.approx(format.nbytes(4096, 4096) * 8 / 4096**2, abs=0.006), text
