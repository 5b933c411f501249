"""The oldest versions of packages that pyproject.toml declares, installed in folders beside the environment."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Tried together; PyTorch is large, and Triton has its own test.
PYTHON_PACKAGES = ("transformers", "filelock", "safetensors", "tqdm", "pydantic", "typer", "rich")
NO_REGISTRY = ("connection broken", "from versions: none")  # what pip says where it reaches none


def lower_bounds() -> dict[str, str]:
    """Name → the oldest version, of each package that pyproject.toml bounds so."""
    found = re.findall(r'"([A-Za-z][\w-]*)>=([\d.]+)', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return dict(found)


def requirement(name: str) -> str:
    """pip's words for the oldest version of a package."""
    return f"{name}=={lower_bounds()[name]}"


def same_version(found: str, bound: str) -> bool:
    """Whether a version is the one that a bound names, which may leave zeros out: 0.19 is 0.19.0."""
    numbers = [int(number) for number in bound.split(".")]
    return [int(number) for number in found.split(".")] == numbers + [0] * (found.count(".") + 1 - len(numbers))


def installed(config: pytest.Config, *requirements: str, dependencies: bool) -> Path:
    """A folder with these packages, with what they need or without; kept for later runs. Skips without a registry."""
    assert config.cache is not None
    key = hashlib.sha256(repr((requirements, dependencies, sys.version_info[:2])).encode()).hexdigest()[:16]
    folder = config.cache.mkdir("oldest") / key
    if not folder.exists():
        partial = folder.with_suffix(f".{os.getpid()}")
        options = ["--quiet", "--no-compile", "--retries", "1", "--timeout", "20", "--target", partial]
        if not dependencies:
            options.append("--no-deps")
        command = [sys.executable, "-m", "pip", "install", *options, *requirements]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=600)
        if done.returncode and any(text in done.stderr for text in NO_REGISTRY):
            pytest.skip(f"pip reaches no registry with {', '.join(requirements)}")
        assert done.returncode == 0, done.stderr[-3000:]
        partial.rename(folder)
    return folder


def run_with(folder: Path, *arguments: object) -> str:
    """What `python ARGUMENTS` prints with the packages of `folder` before those of the environment."""
    path = os.pathsep.join((str(folder), str(ROOT)))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *(str(argument) for argument in arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout
