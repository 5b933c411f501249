"""The emulator of AMX against the manual: what its instructions compute, and what they refuse.

Run as a program with the emulator's path, it does both in a process of its own, where signals are handled.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.amx.programs import NATIVE, built_emulator, compiled, loaded, pointer, shown_configuration


def configuration(rows: int = 16, row_bytes: int = 64, **changed: int) -> bytearray:
    """All eight tiles; `changed` by the names of bytes: b0 is the first."""
    found = bytearray(64)
    found[0] = 1
    for tile in range(8):
        found[16 + 2 * tile] = row_bytes
        found[48 + tile] = rows
    for name, value in changed.items():
        found[int(name[1:])] = value
    return found


def multiply(library: ctypes.CDLL, x: Tensor, y: Tensor, sums: Tensor, configured: bytearray) -> None:
    library.amx_product(*(ctypes.c_void_p(t.data_ptr()) for t in (x, y, sums)), pointer(configured))


def flushed(x: Tensor) -> Tensor:
    return torch.where(x.abs() < torch.finfo(torch.float32).tiny, torch.zeros_like(x), x)


def as_the_manual_says(x: Tensor, y: Tensor, sums: Tensor) -> Tensor:
    """TDPBF16PS on x [rows, pairs, 2] and y [pairs, columns, 2]: the products of even and of odd places summed apart,
    rounded to float32 at each step; a float64 holds a product and a sum exactly where they are not 2**29 apart.
    """
    x, y, chains = flushed(x.float()).double(), flushed(y.float()).double(), torch.zeros(*sums.shape, 2)
    for pair in range(x.shape[1]):
        chains = flushed((chains.double() + x[:, None, pair] * y[None, pair]).float())
    return flushed(flushed(sums) + flushed(chains[..., 0] + chains[..., 1]))


def check_product(library: ctypes.CDLL, x: Tensor, y: Tensor, sums: Tensor, rows: int = 16, columns: int = 16) -> None:
    """By 16 rows of `columns` pairs and so on: smaller tiles leave what is beyond them as it is."""
    assert columns == 16 or rows == columns, "one shape for all three tiles"
    wanted, found = sums.clone(), sums.clone()
    wanted[:rows, :columns] = as_the_manual_says(x[:rows, :columns], y[:rows, :columns], sums[:rows, :columns])
    multiply(library, x, y, found, configuration(rows, 4 * columns))
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    assert bool(same.all()), f"{int((~same).sum())} sums differ, {found[~same][:3]} instead of {wanted[~same][:3]}"


def product_cases(library: ctypes.CDLL) -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        x, y, sums = torch.randn(16, 16, 2).bfloat16(), torch.randn(16, 16, 2).bfloat16(), torch.randn(16, 16)
        check_product(library, x, y, sums)
        check_product(library, x, y, sums, rows=7, columns=7)
        for value in (float("nan"), float("inf"), 1e-39, -1e-40):
            x[seed % 16, 3, seed % 2], y[5, 15 - seed % 16, 1], sums[2, 2] = value, -value, value
            check_product(library, x, y, sums)
        check_product(library, x * 1e-20, y * 2e-19, sums * 0)  # products at the border of what is subnormal
    assert shown_configuration(library) == configuration()
    sums = torch.ones(16, 16)
    library.amx_zero(ctypes.c_void_p(sums.data_ptr()))
    assert bool((sums == 0).all())
    library.amx_release()
    assert shown_configuration(library) == bytes(64)
    assert library.amx_releases() == 1 and library.amx_products() == 20 * 7


FAULTS: dict[str, Callable[[ctypes.CDLL], object]] = {
    "LDTILECFG with palette 0": lambda library: faulty(library, b0=0),
    "LDTILECFG with an unknown palette": lambda library: faulty(library, b0=2),
    "LDTILECFG with a start row": lambda library: faulty(library, b1=1),
    "LDTILECFG with reserved bytes": lambda library: faulty(library, b9=1),
    "LDTILECFG with a tile of more than 16 rows": lambda library: faulty(library, b50=17),
    "or 64 bytes in a row": lambda library: faulty(library, b16=65),
    "LDTILECFG with rows of 0 bytes": lambda library: faulty(library, b18=0),
    "LDTILECFG with a tile beyond the eighth": lambda library: faulty(library, b32=64, b56=16),
    "a tile is used that is not configured": lambda library: faulty(library, b22=0, b51=0),
    "TDPBF16PS: shapes do not fit": lambda library: faulty(library, b51=15),
    "TDPBF16PS with rows of part of a word": lambda library: faulty(library, b24=62),
    "in a thread that is not configured": lambda library: library.amx_zero(None),
    "TDPBF16PS with one tile in two places": lambda library: (faulty(library), library.amx_one_tile_twice()),
    "": lambda library: library.amx_undefined(),  # left to whoever handled the signal before
}


def faulty(library: ctypes.CDLL, **changed: int) -> None:
    x = torch.zeros(16, 16, 2).bfloat16()
    multiply(library, x, x, torch.zeros(16, 16), configuration(**changed))


def fault_cases(library: ctypes.CDLL) -> None:
    """Each in a child, since the emulator ends it."""
    for text, run in FAULTS.items():
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(write, sys.stderr.fileno())
            run(library)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as said:
            found = said.read()
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"{text!r}: not refused"
        assert os.WTERMSIG(status) == (signal.SIGABRT if text else signal.SIGILL), (
            f"{text!r}: ended by signal {os.WTERMSIG(status)}"
        )
        assert text in found and found.startswith("amx emulator: " if text else ""), f"{found!r} instead of {text!r}"


@pytest.mark.slow
@compiled
@pytest.mark.skipif(NATIVE, reason="the processor executes these instructions itself")
def test_the_emulator_does_what_the_manual_says(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(built_emulator(tmp_path))],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    torch.set_num_threads(1)
    emulator = loaded(sys.argv[1])
    fault_cases(emulator)
    product_cases(emulator)
