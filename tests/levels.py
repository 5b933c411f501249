"""The instruction sets of the C++ kernels: a test file that is also a program runs its cases with each that the machine
has.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from infuse.native import isa

LEVELS = ("generic", "avx2", "avx512", "avx512_bf16", "avx512_amx")  # as in ops/cpu/src/detect.cpp, lowest first
TILED = ("avx512_bf16", "avx512_amx")  # those that multiply many rows, and attend with many queries, by tiles


def run_at_level(level: str, *arguments: str) -> subprocess.CompletedProcess:
    """Python with `arguments`, run in tests/ with INFUSE_CPU_ISA=`level`."""
    environment = os.environ | {"INFUSE_CPU_ISA": level}
    return subprocess.run(
        [sys.executable, *arguments], cwd=Path(__file__).parent, env=environment, capture_output=True, text=True
    )


def at_level(level: str, *arguments: str) -> str:
    """What Python prints for `arguments` with that level forced; skipped where the machine lacks it."""
    top = isa()
    assert top in LEVELS
    if LEVELS.index(level) > LEVELS.index(top):
        pytest.skip(f"this machine has {top} at most")
    run = run_at_level(level, *arguments)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return run.stdout
