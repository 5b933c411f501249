"""The kernels with each instruction set below this machine's best one, with which all other tests run.

Run as a program, it runs their cases: a process chooses its instruction set once.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from levels import LEVELS, at_level

FILES = ("cpu_experts", "cpu_linear", "cpu_quantize", "cpu_shared", "cpu_short_activations")  # programs of their own
CASES = ("test_cpu_attention.py", "test_ops.py::test_body_is_the_reference")


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_every_instruction_set(level: str) -> None:
    out = at_level(level, Path(__file__).name)
    assert out.split()[: len(FILES)] == [level] * len(FILES) and " passed" in out, out


if __name__ == "__main__":
    for name in FILES:
        runpy.run_path(f"test_{name}.py", run_name="__main__")
    sys.exit(pytest.main([*CASES, "-k", "cpu and not threads and not split", "-p", "no:cacheprovider"]))
