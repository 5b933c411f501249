"""The examples of docs/diffusion.md, in their order, and examples/diffusion.py."""

from __future__ import annotations

import re
import runpy
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "diffusion.md").read_text(encoding="utf-8")
BLOCKS = [textwrap.dedent(block).strip() for block in re.findall(r"(?:^    .*\n|^\n(?=    ))+", TEXT, re.MULTILINE)]


@pytest.mark.slow
def test_the_examples_run() -> None:
    names: dict[str, Any] = {}
    code = [block for block in BLOCKS if "import" in block or "infuse." in block or "engine" in block]
    for block in code[:4]:
        exec(compile(block, "docs/diffusion.md", "exec"), names)
    assert names["image"].size == (64, 64) and names["profile"].as_dict()["forwards"] == 2
    assert any(step.formats for step in names["unet"].plan.steps)
    names["pipe"] = names["small_pipeline"]()
    for block in code[4:]:
        exec(compile(block, "docs/diffusion.md", "exec"), names)
    depths = {step.depth for step in names["engine"].plan["unet"].steps}
    assert depths == {"linear"} and len(code) == 6


def test_the_example_makes_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "picture.png"
    monkeypatch.setattr(sys, "argv", ["diffusion.py", "--steps", "1", "--out", str(out)])
    runpy.run_path(str(ROOT / "examples/diffusion.py"), run_name="__main__")
    assert out.stat().st_size > 1000 and "1 steps:" in capsys.readouterr().out
