"""What the machine gives at best: read bandwidth and matmul rate, the bounds that every speed is compared with.

Knows nothing of models. Other guests of a machine share its memory: on one 2-core guest the rate stood at 23, 30 and 55
GB/s for ten seconds to minutes each, with no time stolen from the processors. So probe in the run whose figures are
judged, best in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from infuse import memory
from infuse.native import isa, kernels


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second over repeated reads of one buffer. `best`, the fastest pass, is the bound: nothing reads faster
    than memory gives; a `median` far below it says that something else was using the memory. `reader` names what read.
    """

    best: float
    median: float
    reader: str


class MemoryReader:
    """A buffer of `size_bytes` on `device`, and what reads it once from end to end: on CPUs all of PyTorch's threads.

    On CPUs that is the kernel `read_bytes` (src/probe.h), torch.sum of float32 where there are no kernels. `huge_pages`
    asks Linux for pages of 2 MiB: in a virtual machine pages of 4 KiB cost a tenth to a third of the rate. `size_bytes`
    must be well beyond the caches, or they serve a part of it.
    """

    def __init__(self, device: torch.device | str = "cpu", size_bytes: int = 1 << 30, *, huge_pages: bool = True):
        self.device = torch.device(device)
        empty = memory.empty if huge_pages else torch.empty
        # Ones, not zeros: untouched zero pages would all be one page, read from the cache.
        self._values = empty((size_bytes // 4,), dtype=torch.float32, device=self.device).fill_(1)
        self.size_bytes = self._values.nbytes
        self._read: Callable[[Tensor], object] = torch.sum
        self.name = "torch.sum"
        if self.device.type == "cpu":
            found = kernels()
            if isinstance(found, str):
                self.name = f"torch.sum ({found})"
            else:
                self._read, self.name = found.read_bytes.default, f"read_bytes ({isa()})"

    def __call__(self) -> None:
        """Read it once."""
        self._read(self._values)

    def bandwidth(self, seconds: Sequence[float]) -> Bandwidth:
        """What passes that took `seconds` each come to."""
        return Bandwidth(self.size_bytes / min(seconds), self.size_bytes / median(seconds), self.name)


def read_bandwidth(
    *, device: torch.device | str = "cpu", size_bytes: int = 1 << 30, repeats: int = 30, huge_pages: bool = True
) -> Bandwidth:
    """The bandwidth of `repeats` passes of a `MemoryReader`."""
    reader = MemoryReader(device, size_bytes, huge_pages=huge_pages)
    return reader.bandwidth(_seconds(reader, reader.device, repeats))


def matmul_rate(dtype: torch.dtype, n: int = 2048, *, device: torch.device | str = "cpu", repeats: int = 7) -> float:
    """Floating-point operations per second of `F.linear` on two n × n matrices of `dtype`: the median of `repeats`."""
    generator = torch.Generator(device).manual_seed(0)
    # Random values: matrices of zeros draw less power, so GPUs run them faster than anything real.
    x, weight = (torch.randn(n, n, device=device, generator=generator).to(dtype) for _ in range(2))
    return 2 * n**3 / median(_seconds(lambda: F.linear(x, weight), torch.device(device), repeats))


def _seconds(run: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """The times of `run` after two calls that warm up."""
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
