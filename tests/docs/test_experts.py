"""The examples of docs/experts.md, on as many ranks as they say."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.deepspeed_layers import mixture
from tests.support.ranks import Ranks

TEXT = (Path(__file__).parents[2] / "docs" / "experts.md").read_text(encoding="utf-8")
BLOCKS = [textwrap.dedent(block).strip() for block in re.findall(r"(?:^    .*\n|^\n(?=    ))+", TEXT, re.MULTILINE)]
MODEL, *CODES = [block for block in BLOCKS if "import" in block or "infuse." in block]
RANKS = [int(found[1]) if (found := re.search(r"--nproc-per-node (\d)", code)) else 1 for code in CODES]


def run(code: str, deepspeeds: bool) -> tuple[torch.Tensor, torch.Tensor, str]:
    """What the original gives, what the engine gives, and the plan."""
    import infuse

    names: dict[str, Any] = {"infuse": infuse}
    exec(compile(MODEL, "docs/experts.md", "exec"), names)
    if deepspeeds:
        names["model"] = mixture(drop_tokens=False, top2_2nd_expert_sampling=False)
    ids = torch.arange(5, 15)[None]
    with torch.no_grad():
        wanted = names["model"](ids).logits
        original = names["model"]
        exec(compile(code, "docs/experts.md", "exec"), names)
        if names["model"] is not original:  # the example has one of its own
            wanted = names["model"](ids).logits
        return wanted, names["engine"](ids).logits, str(names["engine"].plan)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CODES)))
def test_the_examples_run(number: int, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    size, last = RANKS[number], number == len(CODES) - 1
    results = ranks.run(size, run, CODES[number], last) if size > 1 else [run(CODES[number], last)]
    wanted, found, plan = results[0]
    rounds = 'quant="int8' in CODES[number]
    assert (found - wanted).norm() / wanted.norm() < (0.05 if rounds else 1e-4)
    assert "refused" not in plan
    assert last or (f"rank 0 of {size}" if size > 1 else "int8" if rounds else "mxfp4") in plan


def test_the_plan_that_is_shown_is_the_plan(ranks: Ranks) -> None:
    shown = next(block for block in BLOCKS if "experts on a rank" in block)
    assert RANKS == [1, 2, 2, 4, 2, 1, 1, 1] and shown in ranks.run(2, run, CODES[1], False)[0][2]
