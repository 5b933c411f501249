"""What the machine gives at best: read bandwidth and matmul rate, the bounds that every speed is compared with.

Knows nothing of models. A probe takes a second or two; times drift, so probe in the run whose figures are judged.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F


def read_bandwidth(*, device: torch.device | str = "cpu", size_bytes: int = 1 << 30, repeats: int = 7) -> float:
    """Bytes per second at which `device` reads memory: the median over sums of one float32 tensor of `size_bytes`."""
    # Ones, not zeros: untouched zero pages would all be one page, read from the cache.
    values = torch.ones(size_bytes // 4, dtype=torch.float32, device=device)
    return values.nbytes / _median_seconds(values.sum, torch.device(device), repeats)


def matmul_rate(dtype: torch.dtype, n: int = 2048, *, device: torch.device | str = "cpu", repeats: int = 7) -> float:
    """Floating-point operations per second of `F.linear` on two n × n matrices of `dtype`: the median of `repeats`."""
    generator = torch.Generator(device).manual_seed(0)
    # Random values: matrices of zeros draw less power, so GPUs run them faster than anything real.
    x, weight = (torch.randn(n, n, device=device, generator=generator).to(dtype) for _ in range(2))
    return 2 * n**3 / _median_seconds(lambda: F.linear(x, weight), torch.device(device), repeats)


def _median_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median time of `run` after two calls that warm up."""
    seconds = []
    for _ in range(2 + repeats):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        seconds.append(time.perf_counter() - start)
    return median(seconds[2:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
