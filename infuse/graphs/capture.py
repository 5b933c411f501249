"""Backend: a small protocol for capturing and replaying CUDA graphs, so that the logic around it runs without a GPU."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from infuse.ground.modes import Transparent

_T = TypeVar("_T")


class Captured(Protocol):
    """A captured graph. `nbytes` is its device memory in bytes, without its inputs and results."""

    nbytes: int

    def replay(self) -> None:
        """Run it on the tensors that it was captured with."""


class Backend(Protocol):
    """Captures and replays graphs. Tests use a recorder on the CPU instead."""

    def warm(self, run: Callable[[], _T]) -> _T:
        """Run once under the conditions of a capture: on a side stream."""

    def capture(self, run: Callable[[], _T]) -> tuple[Captured, _T]:
        """Record what `run` launches without running it. The result holds no values before the first replay."""

    def capturing(self) -> bool:
        """Whether this thread is capturing."""

    def turn(self) -> Any:
        """Return a context that serializes threads and streams, for filling inputs, replaying and copying results."""


@dataclass
class _CudaCaptured:
    graph: torch.cuda.CUDAGraph
    nbytes: int

    def replay(self) -> None:
        self.graph.replay()


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Disable autocast's weight cache during a capture: the graph would read copies after autocast has freed them."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class FilledNumbers(Transparent, TorchFunctionMode):
    """Context in which `torch.tensor` of a number fills memory on its device, instead of copying from the host.

    A graph records no such copy, and models make their masks with them.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        number: Any = args[0] if func is torch.tensor and args else None
        if type(number) not in (bool, int, float) or kwargs.keys() - {"dtype", "device"}:
            return func(*args, **kwargs)
        dtype = kwargs.get("dtype") or {bool: torch.bool, int: torch.int64}.get(type(number))
        return torch.full((), number, dtype=dtype or torch.get_default_dtype(), device=kwargs.get("device"))


class CudaBackend:
    """torch.cuda.CUDAGraph on one device. All graphs share a memory pool, so replays must not overlap (see `turn`)."""

    def __init__(self, device: torch.device | str):
        self.device = torch.device(device)
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._last: torch.cuda.Event | None = None
        self._failed: list[torch.cuda.CUDAGraph] = []
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
        gc.disable()  # device memory freed by a collection would become part of the capture or break it
        try:
            with torch.cuda.stream(side):
                # thread_local: CUDA calls of other threads do not break the capture
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    with FilledNumbers():
                        result = run()
                except BaseException:
                    with suppress(RuntimeError):  # the capture has failed already, and its error is being raised
                        graph.capture_end()
                    self._end_failed_capture(graph)
                    raise
                graph.capture_end()
        finally:
            if collects:
                gc.enable()
        return _CudaCaptured(graph, max(torch.cuda.memory_reserved(self.device) - before, 0)), result

    def _end_failed_capture(self, graph: torch.cuda.CUDAGraph) -> None:
        """End on PyTorch's side what `capture_end` leaves open after a failure.

        The allocator still takes memory from the pool, by asking the graph, and the random generator fails until
        another capture ends as it should. Memory of earlier graphs stays in their pool; later ones share a new one.
        """
        self._failed.append(graph)
        self._pool, old = torch.cuda.graph_pool_handle(), self._pool
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        with suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(index, old)
        with suppress(RuntimeError):
            empty = torch.cuda.CUDAGraph()
            empty.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
            torch.zeros(1, device=self.device)
            empty.capture_end()

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


def backend_for(device: torch.device | str) -> Backend | None:
    """Return the backend of a device; None if it has no graphs."""
    device = torch.device(device)
    return CudaBackend(device) if device.type == "cuda" else None
