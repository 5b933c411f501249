"""What benchmarks share: timing in turns, bounds, the head of a report, and the files that it is written to."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import infuse
from infuse.ground.device import cpu_features
from infuse.native import isa
from infuse.profile.probe import Bandwidth, instruction_rates, matmul_rate

MATMUL = "bfloat16 matmul"


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


def product_rates() -> dict[str, float]:
    """Operations per second of each instruction in registers, and of F.linear, which also has to load and store."""
    return {**instruction_rates(), MATMUL: matmul_rate(torch.bfloat16)}


def instruction(name: str, rates: Mapping[str, float]) -> str:
    """The one of `rates` that bounds the products of a contestant, which is named by its dtype or format."""
    order = ["AMX bf16", "bf16 dot", "float32 FMA", MATMUL]
    if name.endswith("float32"):
        order = order[2:]
    elif name.endswith(":a8") and "AMX bf16" not in rates:  # with AMX we leave activations in 16 bits
        order = ["VNNI", *order]
    return next(one for one in order if one in rates)


@dataclass(frozen=True)
class Bound:
    """The least seconds that the machine allows, and which of its rates says so."""

    seconds: float
    by: str

    def share(self, taken: float) -> str:
        return f"{self.seconds / taken:.2f} {self.by}"


def bound(read_bytes: float, bytes_per_second: float, operations: float, rates: Mapping[str, float], by: str) -> Bound:
    """Reading and multiplying overlap: the bound is the slower of the two."""
    found = (Bound(read_bytes / bytes_per_second, "read"), Bound(operations / rates[by], by))
    return max(found, key=lambda one: one.seconds)


def probed(bandwidth: Bandwidth, rates: Mapping[Any, float]) -> str:
    """The bounds of this run in one line; `rates`: operations per second of an instruction, or of F.linear by dtype."""
    read = f"read {bandwidth.best / 1e9:.1f} GB/s (median {bandwidth.median / 1e9:.1f}) by {bandwidth.reader}"
    named = {f"{str(one)[6:]} matmul" if isinstance(one, torch.dtype) else one: rate for one, rate in rates.items()}
    return ", ".join(["probed: " + read, *(f"{name} {rate / 1e12:.2f} TFLOP/s" for name, rate in named.items())])


def markdown(table: Table, remarks: str) -> str:
    """The table below the date, the command, the machine, the versions and `remarks`."""
    console = Console(width=180, no_color=True)
    with console.capture() as captured:
        console.print(table)
    return f"{date.today()}: `python {' '.join(sys.argv)}`\n\n{machine()}\n\n{remarks}\n\n```\n{captured.get()}```\n"


def machine() -> str:
    """The machine and the versions."""
    threads, features = torch.get_num_threads(), " ".join(cpu_features())
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, infuse {infuse.__version__}"
    return f"{platform.machine()}, {threads} threads, {features}; kernels: {isa() or 'none'}; {versions}"


def save(path: Path | None, title: str, rows: list[dict[str, Any]], rates: Mapping[str, float]) -> None:
    """Write figures for bench/plot.py; no path: nothing.

    A row has "name", "prefill_s", "step_s" by the rows of a batch, and "bounds": of "prefill" and of each step, a pair
    of seconds and the name of the rate.
    """
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    told = {"date": str(date.today()), "command": f"python {' '.join(sys.argv)}", "machine": machine(), "title": title}
    path.write_text(json.dumps({**told, "rates": rates, "rows": rows}, indent=1) + "\n")


def show(text: str, out: Path | None) -> None:
    """Print a report, and append it to `out`."""
    Console().print(text, highlight=False, markup=False, soft_wrap=True)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file:
            file.write(text + "\n")
