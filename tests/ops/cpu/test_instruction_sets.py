"""The kernels with each instruction set below this machine's best one, with which all other tests run.

Run as a program, it runs their cases: a process chooses its instruction set once.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests.support.levels import LEVELS, at_level

HERE = Path(__file__).parent
FILES = ("experts", "linear", "quantize", "shared", "short_activations")  # programs of their own
CASES = (
    str(HERE / "test_attention.py"),
    str(HERE / "test_latent_attention.py"),
    f"{HERE.parent / 'test_ops.py'}::test_body_is_the_reference",
)


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_every_instruction_set(level: str) -> None:
    out = at_level(level, __file__)
    assert out.split()[: len(FILES)] == [level] * len(FILES) and " passed" in out, out


if __name__ == "__main__":
    for name in FILES:
        runpy.run_path(str(HERE / f"test_{name}.py"), run_name="__main__")
    sys.exit(pytest.main([*CASES, "--full", "-k", "cpu and not threads and not split", "-p", "no:cacheprovider"]))
