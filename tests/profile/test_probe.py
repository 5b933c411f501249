"""The probes: the kernel reads every word once, on every instruction set; what a figure is made of; who reads where
there are no kernels.

Run as a program, it prints the instruction set and the kernel's results: so the tests force lower sets in processes of
their own.
"""

from __future__ import annotations

from functools import reduce
from operator import xor

import pytest
import torch
from torch import Tensor

from infuse.native import isa, kernels
from infuse.profile import probe
from tests.support.levels import at_level
from tests.support.threads import thread_counts

# In words: none, tails of the unrolled loop, several pieces (of 4 MiB) with a tail.
WORDS = (0, 1, 15, 16, 17, 127, (1 << 19) + 3, (1 << 20) + 16)
built = pytest.mark.skipif(isinstance(kernels(), str), reason=str(kernels()))


def words(count: int) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(count))


def read() -> list[int]:
    return [kernels().read_bytes(words(count)) for count in WORDS]


@built
def test_every_word_is_read_once() -> None:
    wanted = [reduce(xor, words(count).tolist(), 0) for count in WORDS]
    for threads in thread_counts(1, 2, 3):
        assert read() == wanted, threads
    shifted = words(1000)[3:]  # not at the start of a cache line
    assert kernels().read_bytes(shifted) == reduce(xor, shifted.tolist())


@built
@pytest.mark.parametrize("level", ["generic", "avx2", "avx512", "avx512_bf16"])
def test_every_instruction_set_reads_the_same(level: str) -> None:
    ran, found = at_level(level, __file__).splitlines()
    assert ran == level and found == str(read())


@built
def test_what_the_kernel_does_not_take() -> None:
    for wrong in (torch.zeros(3, dtype=torch.float32), torch.zeros(4, 4).T[1:]):
        with pytest.raises(RuntimeError, match="read_bytes takes a contiguous tensor"):
            kernels().read_bytes(wrong)


@pytest.mark.parametrize("huge_pages", [True, False])
def test_a_probe_is_bytes_by_time(huge_pages: bool) -> None:
    reader = probe.MemoryReader(size_bytes=1 << 20, huge_pages=huge_pages)
    found = reader.bandwidth([0.5, 0.25, 1.0])
    assert (found.best, found.median) == ((1 << 20) / 0.25, (1 << 20) / 0.5)
    found = probe.read_bandwidth(size_bytes=1 << 22, repeats=3, huge_pages=huge_pages)
    assert found.best >= found.median > 1e8
    assert found.reader == reader.name and (isa() or "torch.sum") in found.reader


@built
def test_the_rates_are_those_of_the_instructions_there_are() -> None:
    found = probe.instruction_rates(repeats=1, rounds=1000)
    has = {"generic": (), "avx2": (0,), "avx512": (0, 2), "avx512_bf16": (0, 1, 2), "avx512_amx": (0, 1, 2, 3)}
    assert list(found) == [probe.INSTRUCTIONS[number] for number in has[str(isa())]]
    assert all(rate > 1e9 for rate in found.values())


def test_without_kernels_torch_reads_and_the_probe_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "kernels", lambda: "there are none")
    found = probe.read_bandwidth(size_bytes=1 << 20, repeats=2)
    assert found.reader == "torch.sum (there are none)" and found.best > 0
    assert probe.instruction_rates() == {}


if __name__ == "__main__":
    print(isa())
    print(read())
