"""What the GPU benchmark times with: seconds on the device, the bounds of the device, and how much time is left."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from infuse.profile.probe import matmul_rate


@dataclass(frozen=True)
class Bounds:
    """Measured on this device in this run: bytes per second of reading; operations per second of a product."""

    read_bytes: float
    matmul_operations: float

    def __str__(self) -> str:
        return f"read {self.read_bytes / 1e12:.2f} TB/s, bfloat16 matmul {self.matmul_operations / 1e12:.0f} TFLOP/s"


class Budget:
    """The seconds that the whole run may take. What no longer fits is left out, and `skipped` says so."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds
        self.skipped: list[str] = []

    def left(self) -> float:
        return self._end - time.monotonic()

    def allows(self, what: str, seconds: float) -> bool:
        if self.left() < seconds:
            self.skipped.append(f"{what} (needs {seconds:.0f} s, {max(self.left(), 0):.0f} s were left)")
            return False
        return True


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_seconds(run: Callable[[], object], device: torch.device, repeats: int, warm: int = 1) -> list[float]:
    """Seconds of `run`, host time and the end of all work on the device included."""
    seconds = []
    for repeat in range(warm + repeats):
        wait(device)
        start = time.perf_counter()
        run()
        wait(device)
        if repeat >= warm:
            seconds.append(time.perf_counter() - start)
    return seconds


def device_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds of `run` as a CUDA graph, between events: no time of the host in it. On a CPU the wall clock."""
    if device.type != "cuda":
        return median(wall_seconds(run, device, repeats))
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize(device)
        times.append(start.elapsed_time(end) / 1e3)
    return median(times)


def bounds(device: torch.device, tiny: bool) -> Bounds:
    """The rate of a sum of 4 GiB, and of a product of 8192³, both of random data."""
    values = torch.randn(1 << 16 if tiny else 1 << 30, device=device)
    read = values.nbytes / device_seconds(lambda: values.sum(), device, 10)
    return Bounds(read, matmul_rate(torch.bfloat16, 64 if tiny else 8192, device=device))


def read_bytes(model: Any) -> int:
    """Bytes of weights that one decode step reads: all, but only one row of an embedding that is not the head's."""
    total = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    looked_up = model.get_input_embeddings()
    head = model.get_output_embeddings()
    own = next(iter(looked_up.parameters()), None)
    shared = {t.data_ptr() for t in (*head.parameters(), *head.buffers())} if head is not None else set()
    return total - (own.nbytes if own is not None and own.data_ptr() not in shared else 0)
