"""The binary and the wheel: symbols of the stable ABI alone, operators without strings, and a wheel that works where
there is no compiler.

The wheel's build runs a stand-in for the compiler, which copies the kernels of this checkout; the installation that the
tests run on has compiled them.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch

from infuse.native import BINARY, isa, kernels
from tests.support.stand_in_compiler import write_compiler

ROOT = Path(__file__).parents[2]
built = pytest.mark.skipif(isinstance(kernels(), str) or not BINARY.exists(), reason="this checkout has no kernels")

# PyTorch's C functions, which stay as they are from version to version; C and C++ runtime; what the loader and the
# linker add.
STABLE = re.compile(r"(aoti_torch|torch)_\w+$")
RUNTIME = re.compile(r".*@(GLIBC|GLIBCXX|CXXABI|GCC)_[\d.]+$|(_ITM_\w+|__gmon_start__)$")


@built
@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm (binutils)")
def test_the_binary_asks_pytorch_for_its_stable_abi_alone() -> None:
    """What it asks for is in every torch from TORCH_TARGET_VERSION on: PyTorch's headers hide what is newer, and C++
    symbols (c10::, at::), which change from version to version, are not among it.
    """
    lines = subprocess.run(
        ["nm", "-D", "--undefined-only", BINARY], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    symbols = [line.split()[-1] for line in lines]
    assert "torch_library_impl" in symbols  # the operators are registered through it
    assert [symbol for symbol in symbols if not STABLE.match(symbol) and not RUNTIME.match(symbol)] == []


@built
def test_no_operator_takes_or_returns_a_string() -> None:
    """Each would stay in memory for ever (ops/cpu/src/binding.h)."""
    schemas = [each for each in torch._C._jit_get_all_schemas() if each.name.startswith("infuse_cpu::")]
    assert {"infuse_cpu::hold", "infuse_cpu::isa", "infuse_cpu::run"} <= {each.name for each in schemas}
    types = {str(each): [str(value.type) for value in (*each.arguments, *each.returns)] for each in schemas}
    assert [schema for schema, named in types.items() if any("str" in each for each in named)] == []


def run(*command: object, cwd: Path, **variables: str) -> str:
    """What the command prints; nothing of this checkout is on its path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run([str(part) for part in command], env=environment, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


PROGRAM = """
import shutil, sys, torch
from pathlib import Path
import infuse
from infuse import ops
from infuse.native import isa, kernels
assert Path(infuse.__file__).is_relative_to(sys.prefix), infuse.__file__
assert not any(shutil.which(name) for name in ("c++", "g++", "clang++", "cc"))
x, weight = torch.randn(3, 96), torch.randn(96)
found = ops.rms_norm.body("cpu")(x, weight, 1e-6, 0.0)
assert torch.allclose(found, ops.rms_norm(x, weight, 1e-6, 0.0), rtol=1e-5, atol=1e-6)
try:
    kernels().read_bytes(torch.zeros(3))
except RuntimeError as error:  # an exception of the binary passes through PyTorch
    assert "read_bytes takes" in str(error)
else:
    raise AssertionError("no error")
print(isa())
"""


@built
@pytest.mark.slow
@pytest.mark.skipif(
    int(importlib.metadata.version("setuptools").partition(".")[0]) < 77, reason="needs setuptools 77 or later"
)
def test_a_wheel_works_without_a_compiler(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(
        ROOT / "infuse", source / "infuse", ignore=shutil.ignore_patterns("_kernels.so")
    )  # it must come from the build
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    compiler = write_compiler(tmp_path / "compiler" / "c++")
    made = dict(cwd=tmp_path, CXX=str(compiler))
    run(*pip, "wheel", "--no-index", "--no-build-isolation", "--no-deps", "--wheel-dir", tmp_path, source, **made)
    (wheel,) = tmp_path.glob("infuse-*.whl")
    assert wheel.name.split("-")[2:4] == ["py3", "none"] and "any" not in wheel.name

    fresh = tmp_path / "fresh"
    venv.create(fresh, with_pip=False)
    python = fresh / "bin/python"
    alone = dict(cwd=tmp_path, PATH=str(fresh / "bin"))
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", **alone).strip())
    run(*pip, "--python", python, "install", "--no-index", "--no-deps", wheel, **alone)
    # PyTorch and the rest from this environment; of its own .pth files, such as an editable infuse, none counts there.
    (site / "this_environment.pth").write_text(
        "\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    )
    assert run(python, "-c", PROGRAM, **alone).strip() == isa()
