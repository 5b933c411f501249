"""Counters of operations know our ops, whichever of the two is imported first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
COUNTED = """
import torch
x, weight = torch.randn(3, 8), torch.randn(5, 8)
import torch.utils.flop_counter
with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
    torch.ops.infuse.linear(x, weight, None, "", body="reference")
print(counter.get_total_flops())
import sys
from infuse.ops import flops
print(flops._waiting in sys.meta_path)
"""


@pytest.mark.parametrize(
    "imports",
    [
        # looked for, not imported
        "import infuse\nfrom importlib.util import find_spec; find_spec('torch.utils.flop_counter')",
        "import infuse\nimport torch.utils.flop_counter",
        pytest.param("import torch.utils.flop_counter\nimport infuse", marks=pytest.mark.slow),
        pytest.param(
            "import infuse\nfrom importlib import import_module; import_module('torch.utils.flop_counter')",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_formulas_reach_the_counter(imports: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", imports + COUNTED], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split() == [str(2 * 3 * 8 * 5), "False"], done.stderr
