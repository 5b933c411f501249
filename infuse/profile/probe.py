"""Probe the machine's limits, the bounds for every measured speed: read bandwidth, matmul rate, rates of instructions.

Probe in the same run as the figures, ideally in turns with them, because virtual machines share memory bandwidth: one
2-core guest had 23, 30 and 55 GB/s for ten seconds to minutes each, without any stolen CPU time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from infuse.ground import memory
from infuse.native import isa, kernels


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second over repeated reads of one buffer, by the kernel `reader`.

    `best`, the fastest pass, is the bound. A much lower `median` means that something else was using the memory.
    """

    best: float
    median: float
    reader: str


class MemoryReader:
    """Reads a buffer of `size_bytes` on `device` once from end to end, on CPUs with all of PyTorch's threads.

    CPUs use the kernel `read_bytes` (src/probe.h), or torch.sum of float32 without kernels. `huge_pages` asks Linux for
    pages of 2 MiB: in a virtual machine, pages of 4 KiB cost 10 to 33 % of the rate. `size_bytes` must be far larger
    than the caches.
    """

    def __init__(self, device: torch.device | str = "cpu", size_bytes: int = 1 << 30, *, huge_pages: bool = True):
        self.device = torch.device(device)
        empty = memory.empty if huge_pages else torch.empty
        # Ones, not zeros: all untouched zero pages are one page, which stays in the cache.
        self._values = empty((size_bytes // 4,), dtype=torch.float32, device=self.device).fill_(1)
        self.size_bytes = self._values.nbytes
        self._read: Callable[[Tensor], object] = torch.sum
        self.name, library = "torch.sum", kernels() if self.device.type == "cpu" else ""
        if not isinstance(library, str):
            self._read, self.name = library.read_bytes.default, f"read_bytes ({isa()})"
        elif library:
            self.name = f"torch.sum ({library})"

    def __call__(self) -> None:
        """Read it once."""
        self._read(self._values)

    def bandwidth(self, seconds: Sequence[float]) -> Bandwidth:
        """The bandwidth of passes that took `seconds` each."""
        return Bandwidth(self.size_bytes / min(seconds), self.size_bytes / median(seconds), self.name)


def read_bandwidth(
    *, device: torch.device | str = "cpu", size_bytes: int = 1 << 30, repeats: int = 30, huge_pages: bool = True
) -> Bandwidth:
    """Measure the bandwidth of `repeats` passes of a `MemoryReader`."""
    reader = MemoryReader(device, size_bytes, huge_pages=huge_pages)
    return reader.bandwidth(_seconds(reader, reader.device, repeats))


def matmul_rate(dtype: torch.dtype, n: int = 2048, *, device: torch.device | str = "cpu", repeats: int = 7) -> float:
    """Measure operations per second of `F.linear` on two n × n matrices of `dtype`: the median of `repeats` runs."""
    generator = torch.Generator(device).manual_seed(0)
    # Random values: zeros draw less power, so GPUs multiply them faster than real matrices.
    x, weight = (torch.randn(n, n, device=device, generator=generator).to(dtype) for _ in range(2))
    return 2 * n**3 / median(_seconds(lambda: F.linear(x, weight), torch.device(device), repeats))


# What products multiply with, in the order of `enum class Instruction` in src/kernels.h.
INSTRUCTIONS = ("float32 FMA", "bf16 dot", "VNNI", "AMX bf16")
_ROUNDS = 1 << 21  # of 14 instructions (AMX: 4): a few milliseconds


def instruction_rates(*, repeats: int = 5, rounds: int = _ROUNDS) -> dict[str, float]:
    """Measure operations per second of each of INSTRUCTIONS in the registers of all threads: the best of `repeats`.

    Only those that the kernels' instruction set has; empty without kernels.
    """
    library = kernels()
    if isinstance(library, str):
        return {}
    rates = {}
    for number, name in enumerate(INSTRUCTIONS):
        if not (operations := library.multiply_registers.default(number, 1)):
            continue
        run = partial(library.multiply_registers.default, number, rounds)
        rates[name] = operations * rounds / min(_seconds(run, torch.device("cpu"), repeats))
    return rates


def _seconds(run: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Time `run`, after two calls to warm up."""
    seconds = []
    for _ in range(2 + repeats):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        seconds.append(time.perf_counter() - start)
    return seconds[2:]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
