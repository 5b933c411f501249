"""The Triton bodies under Triton's interpreter, on the CPU: cases.py, blocks.py and steps.py, in a process of their
own, since Triton asks for the interpreter when it is imported, and transformers imports it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

import infuse.ops.triton
from infuse.ground.device import Device
from infuse.ops import registered
from infuse.ops.triton.configurations import plain_row, plain_tiles, quantized_row, quantized_tiles
from infuse.ops.triton.experts import sort_routes

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def no_interpreter() -> str:
    """Why the interpreter cannot run here, "" where it can."""
    if find_spec("triton") is None:
        return "triton is not installed"
    found = version("triton")
    try:
        int(np.zeros(1))  # type: ignore[call-overload]  # as Triton 3.6's interpreter has it, 3.9's no more; what between is not known
    except TypeError:
        if tuple(map(int, found.split(".")[:2])) < (3, 9):
            return f"the interpreter of Triton {found} fails with NumPy {np.__version__}"
    return ""


@pytest.mark.skipif(bool(no_interpreter()), reason=no_interpreter())
@pytest.mark.slow
def test_under_the_interpreter(request: pytest.FixtureRequest) -> None:
    paths = [str(HERE / file) for file in ("cases.py", "blocks.py", "steps.py")]
    command = [sys.executable, "-m", "pytest", "--full", "-x", "-p", "no:cacheprovider", *paths]
    if request.config.getoption("--variants"):
        command.append("--variants")
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]


GPU = Device("cuda", 0, "a GPU", ("sm_90",), 2**37, (torch.float32, torch.bfloat16, torch.float16, torch.float64))


@pytest.mark.parametrize("name", sorted(name for name, op in registered().items() if "triton" in op.bodies))
def test_who_declines_says_why(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = registered()[name].bodies["triton"].needs
    monkeypatch.setattr("infuse.ops.triton._missing", lambda: None)
    assert needs(GPU, torch.bfloat16) is None and registered()[name].choose(GPU, torch.float16).body == "triton"
    assert needs(replace(GPU, kind="cpu"), torch.bfloat16) == "the device is cpu"
    assert str(needs(GPU, torch.float64)).startswith("torch.float64 is not one of torch.float32")
    assert needs(replace(GPU, features=("sm_75",)), torch.float16) == (
        "a GPU (sm_75): Triton needs compute capability 8.0 or newer"
    )
    assert needs(replace(GPU, features=("sm_120",)), torch.float16) is None
    monkeypatch.setattr("infuse.ops.triton._missing", lambda: "triton is not installed")
    assert needs(GPU, torch.bfloat16) == "triton is not installed"


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infuse.ops.triton.find_spec", lambda name: None)
    assert infuse.ops.triton._missing.__wrapped__() == "triton is not installed"
    monkeypatch.setattr("infuse.ops.triton.find_spec", lambda name: name)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    assert "no C compiler" in str(infuse.ops.triton._missing.__wrapped__())


def test_routes_are_sorted_into_tiles_of_one_expert() -> None:
    """Each route in range stands in one tile, of its expert; the shapes do not depend on values."""
    for tokens, rows in ((1, 16), (37, 16), (5, 1), (300, 64)):
        index = torch.rand(tokens, 9).argsort(dim=1)[:, :3]  # experts 2 to 7 of 0 to 8 are in range
        routed = sort_routes(index, 2, 6, rows)
        shapes = [tensor.shape for tensor in sort_routes(index.to("meta"), 2, 6, rows)]
        assert shapes == [tensor.shape for tensor in routed]
        found = []
        for expert, start, stop in zip(*(tensor.tolist() for tensor in routed[1:]), strict=True):
            if expert < 6:
                assert start < stop
                found += [(route, expert + 2) for route in routed.order_R[start : min(start + rows, stop)].tolist()]
        wanted = [(i, expert) for i, expert in enumerate(index.flatten().tolist()) if 2 <= expert < 8]
        assert sorted(found) == wanted


def test_launches_fill_the_device() -> None:
    """Enough programs for an H200's multiprocessors, at least two steps for each that shares a sum, and powers of two
    throughout.
    """
    for outputs, inputs in (
        (4096, 4096),
        (6144, 4096),
        (4096, 14336),
        (128256, 4096),
        (2048, 2048),
        (512, 8192),
        (33, 100),
    ):
        for words, format in ((8, "int4"), (16, "int8")):
            for tiles in (
                plain_row(outputs, inputs, 2),
                plain_tiles(8, outputs, inputs),
                quantized_row(outputs, inputs // 64, format, words),
                quantized_tiles(8, outputs, inputs // 64, format, words),
            ):
                numbers = (tiles.outputs, tiles.depth, tiles.warps, tiles.rows, tiles.splits)
                assert all(number & (number - 1) == 0 < number for number in numbers), tiles
                if outputs >= 2048:
                    assert -(-outputs // tiles.outputs) * tiles.splits >= 128, (outputs, inputs, tiles)
