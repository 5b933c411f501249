"""The emulator of AMX (emulator.cpp), built and at work; other C++ programs of the tests."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from infuse.ground.device import cpu_features

HERE = Path(__file__).parent
NATIVE = "amx_bf16" in cpu_features()
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
FLAGS = ("-O2", "-ftree-vectorize", "-ffp-contract=off", "-std=c++20", "-Wall")

compiled = pytest.mark.skipif(
    COMPILER is None or "avx2" not in cpu_features(), reason="no C++ compiler, or not an x86 processor with AVX2"
)


def build(source: str, target: Path, *flags: str) -> Path:
    """`target`, compiled from a file beside this one."""
    command = [str(COMPILER), *FLAGS, *flags, str(HERE / source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


def built_emulator(folder: Path) -> Path:
    return build("emulator.cpp", folder / "amx_emulator.so", "-shared", "-fPIC", "-mavx2", "-mfma")


def loaded(path: str | Path) -> ctypes.CDLL:
    """The emulator at work in this process."""
    library = ctypes.CDLL(str(path))
    for name in ("executed", "products", "configurations", "releases"):
        getattr(library, f"amx_{name}").restype = ctypes.c_int64
    assert library.amx_install() == 0
    return library


def pointer(data: bytearray) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof((ctypes.c_char * len(data)).from_buffer(data)))


def shown_configuration(library: ctypes.CDLL) -> bytearray:
    """What STTILECFG says of the calling thread; zeros where it has none."""
    shown = bytearray(64)
    library.amx_configuration(pointer(shown))
    return shown
