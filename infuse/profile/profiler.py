"""ForwardTimes times each forward; Profile breaks down the time inside a `with` block by module class and op.

Profiling itself takes time: compare shares, not absolute times.
"""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity

from infuse.ground import interrupts
from infuse.ground.device import device_of
from infuse.ground.temporary_hooks import TemporaryHooks
from infuse.profile.probe import read_bandwidth

if TYPE_CHECKING:
    from rich.table import Table

_PROBE_BYTES = 1 << 28  # larger than any cache, small beside a model


class ForwardTimes:
    """The milliseconds of each forward of a module, by CUDA events or the wall clock."""

    def __init__(self, module: nn.Module, use_cuda_events: bool):
        device = device_of(module)
        self._events = use_cuda_events and device.type == "cuda"
        self._cuda = device.type == "cuda"
        self._open: list[Any] = []
        self._done: list[tuple[Any, Any]] = []
        with ExitStack() as undo:
            self._hooks = undo.enter_context(TemporaryHooks())
            self._hooks.before(module, self._start)
            self._hooks.after(module, self._stop, always_call=True)
            undo.pop_all()  # they stay until stop()

    def _now(self) -> Any:
        if self._events:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _start(self, module: nn.Module, args: tuple) -> None:
        self._open.append(self._now())

    def _stop(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self._open:
            self._done.append((self._open.pop(), self._now()))

    def read(self) -> list[float]:
        """Return the times since the last call, in milliseconds."""
        done, self._done = self._done, []
        if self._events:
            torch.cuda.synchronize()
            return [start.elapsed_time(end) for start, end in done]
        return [(end - start) * 1e3 for start, end in done]

    def stop(self) -> None:
        self._hooks.close()


class Profile:
    """Time inside the `with` block by module class and op, tokens per second, and share of the read bandwidth.

    A module's time excludes that of its children. Each forward reads `weight_bytes` once.
    """

    def __init__(self, module: nn.Module, weight_bytes: int):
        self._module, self._weight_bytes = module, weight_bytes
        self._device = device_of(module)
        self._stack: list[list[float]] = []
        self._own_seconds: dict[str, float] = defaultdict(float)
        self._calls: dict[str, int] = defaultdict(int)
        self._steps: list[tuple[int, int, float]] = []  # rows, tokens, seconds of each forward of the root
        self.bandwidth = 0.0
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])
        self._profiler = torch.profiler.profile(activities=activities, acc_events=True)

    @interrupts.held_back()
    def __enter__(self) -> Profile:
        with ExitStack() as undo:
            self._hooks = undo.enter_context(TemporaryHooks())
            for module in self._module.modules():
                self._hooks.before(module, self._enter, with_kwargs=True)
                self._hooks.after(module, self._leave, with_kwargs=True, always_call=True)
            self._profiler.__enter__()
            undo.pop_all()
        self._started = time.perf_counter()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.seconds = time.perf_counter() - self._started
        with interrupts.held_back():
            self._profiler.__exit__(*exception)
            self._hooks.close()
        self.bandwidth = read_bandwidth(device=self._device, size_bytes=_PROBE_BYTES).best

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._stack.append([self._clock(), 0.0])

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        start, inside = self._stack.pop()
        spent = self._clock() - start
        kind = type(module).__name__
        self._own_seconds[kind] += spent - inside
        self._calls[kind] += 1
        if self._stack:
            self._stack[-1][1] += spent
        else:
            inputs = kwargs.get("input_ids", kwargs.get("inputs_embeds", args[0] if args else None))
            shape = inputs.shape if isinstance(inputs, Tensor) and inputs.dim() > 1 else (1, 1)
            self._steps.append((shape[0], shape[1], spent))

    def _clock(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def as_dict(self) -> dict[str, Any]:
        """Seconds, tokens per second, bytes and shares. `modules` and `ops` are lists of rows, slowest first."""
        decode = [(rows, seconds) for rows, tokens, seconds in self._steps if tokens == 1]
        prefill = [(rows * tokens, seconds) for rows, tokens, seconds in self._steps if tokens > 1]
        read_bytes = self._weight_bytes * len(decode)
        decode_seconds = sum(seconds for _, seconds in decode)
        rate = read_bytes / decode_seconds if decode_seconds else None
        modules = sorted(self._own_seconds.items(), key=lambda item: -item[1])
        return {
            "seconds": self.seconds,
            "forwards": len(self._steps),
            "prefill_tokens_per_second": _per_second(prefill),
            "decode_tokens_per_second": _per_second(decode),
            "weight_bytes": self._weight_bytes,
            "read_bytes_per_second": rate,
            "probed_bytes_per_second": self.bandwidth,
            "share_of_bandwidth": rate / self.bandwidth if rate and self.bandwidth else None,
            "modules": [{"kind": kind, "calls": self._calls[kind], "seconds": seconds} for kind, seconds in modules],
            "ops": self._ops(),
        }

    def _ops(self) -> list[dict[str, Any]]:
        spent = f"self_{'device' if self._device.type == 'cuda' else 'cpu'}_time_total"  # microseconds
        events = [event for event in self._profiler.key_averages() if getattr(event, spent) > 0]
        rows = [{"op": event.key, "calls": event.count, "seconds": getattr(event, spent) / 1e6} for event in events]
        return sorted(rows, key=lambda row: -row["seconds"])

    def table(self, rows: int = 12) -> Table:
        """The report as a rich table, with the `rows` slowest modules and ops."""
        from rich.table import Table

        figures = self.as_dict()
        table = Table(title=f"{figures['forwards']} forwards in {figures['seconds']:.3f} s")
        for column in ("", "calls", "ms", "share"):
            table.add_column(column, justify="left" if not column else "right")
        for title, key, name in (("by module (own time)", "modules", "kind"), ("by op (own time)", "ops", "op")):
            total = sum(row["seconds"] for row in figures[key]) or 1.0
            table.add_row(f"[bold]{title}[/bold]")
            for row in figures[key][:rows]:
                seconds = row["seconds"]
                table.add_row(row[name], str(row["calls"]), f"{seconds * 1e3:.2f}", f"{seconds / total:.1%}")
        for kind in ("prefill", "decode"):
            if rate := figures[f"{kind}_tokens_per_second"]:
                table.add_row(f"{kind} tokens/s", "", f"{rate:,.1f}")
        if share := figures["share_of_bandwidth"]:
            label = "weights read, GB/s, of the probed read bandwidth"
            table.add_row(label, "", f"{figures['read_bytes_per_second'] / 1e9:.2f}", f"{share:.1%}")
        return table

    def save_trace(self, path: str | Path) -> None:
        """Write a Chrome trace (JSON) of all ops to `path`."""
        self._profiler.export_chrome_trace(str(path))

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=100, no_color=True)
        with console.capture() as captured:
            console.print(self.table())
        return captured.get()


def _per_second(counted: list[tuple[int, float]]) -> float | None:
    seconds = sum(seconds for _, seconds in counted)
    return sum(count for count, _ in counted) / seconds if seconds else None
