"""The examples of docs/hybrids.md run, one after the other, in one scope."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import infuse

TEXT = (Path(__file__).parents[2] / "docs" / "hybrids.md").read_text(encoding="utf-8")


def test_the_examples_run() -> None:
    examples = [dedent(block) for block in re.findall(r"(?:^    .*\n(?:\n(?=    ))?)+", TEXT, re.MULTILINE)]
    assert len(examples) == 3
    scope: dict[str, Any] = {"infuse": infuse}
    for example in examples:
        exec(compile(example, "docs/hybrids.md", "exec"), scope)
    engine, tokens = scope["engine"], scope["tokens"]
    assert [step.kind.depth for step in engine.plan.steps].count("block") == 4
    assert tokens.shape == (2, 28)
