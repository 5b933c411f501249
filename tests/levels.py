"""The instruction sets of the C++ kernels: a test file that is also a program runs its cases with each that the machine has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from infuse.ops.cpu import isa

LEVELS = ("generic", "avx2", "avx512", "avx512_bf16")  # as in ops/cpu/src/detect.cpp, lowest first


def at_level(level: str, *arguments: str) -> str:
    """What Python prints for `arguments` with that level forced; skipped where the machine lacks it."""
    top = isa()
    assert top in LEVELS
    if LEVELS.index(level) > LEVELS.index(top):
        pytest.skip(f"this machine has {top} at most")
    environment = os.environ | {"INFUSE_CPU_ISA": level}
    run = subprocess.run([sys.executable, *arguments], cwd=Path(__file__).parent, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return run.stdout
