"""Tensors on large pages: the same values, whatever the system grants; where it does, the kernel's own count says so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from infuse import pages

GRANTED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_kilobytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))


@pytest.mark.parametrize("shape", [(0,), (3, 5), (1 << 21,), (1001, 4099)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_copies_are_equal_and_contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    source = torch.randint(-100, 100, shape).float()
    for given in (source, source.flip(0), source.t() if source.dim() == 2 else source):
        found = pages.copied(given, dtype)
        assert found.dtype == dtype and torch.equal(found, given.to(dtype))
        assert found.is_contiguous() or found.nbytes < pages.LEAST_BYTES


def test_what_is_small_and_fits_is_not_copied() -> None:
    source = torch.randn(16, 16)
    assert pages.copied(source, torch.float32) is source


@pytest.mark.skipif(sys.platform != "linux" or not GRANTED.exists() or "[never]" in GRANTED.read_text(), reason="no large pages here")
def test_large_pages_are_given() -> None:
    before = huge_kilobytes()
    held = pages.empty((1 << 26,), torch.int8).fill_(1)
    if huge_kilobytes() == before:
        pytest.skip("the system has no large pages left to give")
    assert huge_kilobytes() - before >= held.nbytes // 1024 // 2
