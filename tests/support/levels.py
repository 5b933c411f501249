"""The instruction sets of the C++ kernels: programs that run cases with each that the machine has below its best."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infuse.native import isa
from tests.support.forked import Program

LEVELS = ("generic", "avx2", "avx512", "avx512_bf16", "avx512_amx")  # as in ops/cpu/src/detect.cpp, lowest first
TILED = ("avx512_bf16", "avx512_amx")  # those that multiply many rows, and attend with many queries, by tiles


def run_at_level(level: str, *arguments: str) -> tuple[int | None, str, str]:
    """The exit code and the outputs of Python with `arguments`, run with INFUSE_CPU_ISA=`level`."""
    program = Program(*arguments, folder=Path(__file__).parents[2], environment=os.environ | {"INFUSE_CPU_ISA": level})
    out, err = program.communicate()
    return program.returncode, out, err


def at_level(level: str, *arguments: str) -> str:
    """What Python prints for `arguments` with that level forced; skipped where it is the best one, or not there."""
    top = isa()
    assert top in LEVELS
    if LEVELS.index(level) > LEVELS.index(top):
        pytest.skip(f"this machine has {top} at most")
    if level == top:
        pytest.skip(f"{level} is what the other tests run here")
    code, out, err = run_at_level(level, *arguments)
    assert code == 0, out[-3000:] + err[-3000:]
    return out
