"""The examples of docs/encoder-decoder.md run, one after the other, in one scope."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent
from typing import Any

TEXT = (Path(__file__).parents[2] / "docs" / "encoder-decoder.md").read_text(encoding="utf-8")


def test_the_examples_run() -> None:
    examples = [dedent(block) for block in re.findall(r"(?:^    .*\n(?:\n(?=    ))?)+", TEXT, re.MULTILINE)]
    assert len(examples) == 2
    scope: dict[str, Any] = {}
    for example in examples:
        exec(compile(example, "docs/encoder-decoder.md", "exec"), scope)
    plan = scope["engine"].plan
    assert [step.kind.depth for step in plan.steps].count("block") == 4
    assert scope["heard"].shape[1] > 1 and scope["tokens"].shape[0] == 2
