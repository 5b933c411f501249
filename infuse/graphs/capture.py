"""Backend: capture and replay of CUDA graphs behind a small protocol, so that the logic around them runs without a GPU."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

_T = TypeVar("_T")


class Captured(Protocol):
    """What was captured. `nbytes` is the device memory that it holds beyond its inputs and results."""

    nbytes: int

    def replay(self) -> None:
        """Run it again, on the tensors that it was captured with."""


class Backend(Protocol):
    """Where graphs are captured and replayed. Tests put a recorder on the CPU in its place."""

    def warm(self, run: Callable[[], _T]) -> _T:
        """Run once, for real, as a capture would run it: on a stream beside the current one."""

    def capture(self, run: Callable[[], _T]) -> tuple[Captured, _T]:
        """Record what `run` does on the device without doing it; its result holds nothing before the first replay."""

    def capturing(self) -> bool:
        """Whether a capture is going on in this thread."""

    def turn(self) -> Any:
        """A context around inputs, replay and results that serializes threads and streams."""


@dataclass
class _CudaCaptured:
    graph: torch.cuda.CUDAGraph
    nbytes: int

    def replay(self) -> None:
        self.graph.replay()


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Around a capture: autocast frees its copies of weights when its block ends, and a graph would go on reading them."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class CudaBackend:
    """torch.cuda.CUDAGraph on one device; all graphs share one memory pool, so replays must not overlap: see `turn`."""

    def __init__(self, device: torch.device | str):
        self.device = torch.device(device)
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._last: torch.cuda.Event | None = None
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple:  # streams and graphs are not copied
        return type(self), (self.device,)

    def _side(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream, self._pool = torch.cuda.Stream(self.device), torch.cuda.graph_pool_handle()
        return self._stream

    def warm(self, run: Callable[[], _T]) -> _T:
        side, current = self._side(), torch.cuda.current_stream(self.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            result = run()
        current.wait_stream(side)
        return result

    def capture(self, run: Callable[[], _T]) -> tuple[Captured, _T]:
        side = self._side()
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_reserved(self.device)
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # what a collection frees on the device would be part of the capture, or break it
        try:
            with torch.cuda.stream(side):
                # thread_local: what other threads ask of the device meanwhile does not break the capture
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = run()
                except BaseException:
                    _end_quietly(graph)
                    raise
                graph.capture_end()
        finally:
            if collects:
                gc.enable()
        return _CudaCaptured(graph, max(torch.cuda.memory_reserved(self.device) - before, 0)), result

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    @contextmanager
    def turn(self) -> Iterator[None]:
        with self._lock:
            current = torch.cuda.current_stream(self.device)
            if self._last is not None:
                current.wait_event(self._last)
            try:
                yield
            finally:
                self._last = self._last or torch.cuda.Event()
                self._last.record(current)


def _end_quietly(graph: torch.cuda.CUDAGraph) -> None:
    with suppress(RuntimeError):  # the capture is broken already, and the error that broke it is on its way up
        graph.capture_end()


def backend_for(device: torch.device | str) -> Backend | None:
    """The backend of a device; None where it has no graphs."""
    device = torch.device(device)
    return CudaBackend(device) if device.type == "cuda" else None
