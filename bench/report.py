"""What benchmarks share: timing in turns, the head of a report, and the file that it is appended to."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table

import infuse
from infuse.device import cpu_features
from infuse.native import isa
from infuse.profile.probe import Bandwidth


def in_turns(runs: Sequence[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Seconds of each of `runs`, one after the other `repeats` times: what slows the machine slows all. A first turn
    warms up.
    """
    seconds: list[list[float]] = [[] for _ in runs]
    for repeat in range(repeats + 1):
        for i, run in enumerate(runs):
            start = time.perf_counter()
            run()
            if repeat:
                seconds[i].append(time.perf_counter() - start)
    return seconds


def memory_bytes(what: str) -> int:
    """A figure of /proc/self/status: VmRSS is the memory that the process has, VmHWM the most that it had."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


def probed(bandwidth: Bandwidth, rates: dict[torch.dtype, float]) -> str:
    """The bounds of this run in one line; `rates` are floating-point operations per second of F.linear."""
    read = f"read {bandwidth.best / 1e9:.1f} GB/s (median {bandwidth.median / 1e9:.1f}) by {bandwidth.reader}"
    return ", ".join(
        ["probed: " + read, *(f"{str(dtype)[6:]} matmul {rate / 1e12:.2f} TFLOP/s" for dtype, rate in rates.items())]
    )


def markdown(table: Table, remarks: str) -> str:
    """The table below the date, the command, the machine, the versions and `remarks`."""
    console = Console(width=150, no_color=True)
    with console.capture() as captured:
        console.print(table)
    machine = (
        f"{platform.machine()}, {torch.get_num_threads()} threads, {' '.join(cpu_features())}; "
        f"kernels: {isa() or 'none'}"
    )
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, infuse {infuse.__version__}"
    return (
        f"{date.today()}: `python {' '.join(sys.argv)}`\n\n{machine}; {versions}\n\n{remarks}\n\n"
        f"```\n{captured.get()}```\n"
    )


def show(text: str, out: Path | None) -> None:
    """Print a report, and append it to `out`."""
    Console().print(text, highlight=False, markup=False, soft_wrap=True)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file:
            file.write(text + "\n")
