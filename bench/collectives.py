"""Sums over the ranks of one host with one thread each: shared memory, gloo behind our guard, and torch.distributed's
own over gloo.

python bench/collectives.py [--ranks 2] [--repeats 300]

The bound: what each rank must copy, at the rate at which it copies its own memory of that size. The message of two
bytes shows what an operation costs besides: the call, and two trips of a cache line between processors. Where a virtual
machine's processors lie on different dies for a while, that and what goes through caches takes twice as long: compare
figures of one run only.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from infuse.native import isa
from infuse.parallel.group import Group, make_group

SIZES_BYTES = (2, 4 << 10, 32 << 10, 128 << 10, 2 << 20, 16 << 20)
WAYS = ("shared memory", "gloo", "torch.distributed")
BATCH_S = 0.002  # of operations between two looks at the clock, so that looking costs nothing


def seconds(run: Callable[[], object], repeats: int, count: int) -> list[float]:
    """Of one operation, over `repeats` batches of `count`."""
    found = []
    for _ in range(repeats + 3):
        start = time.perf_counter()
        for _ in range(count):
            run()
        found.append((time.perf_counter() - start) / count)
    return found[3:]


def ways(groups: dict[str, Group], x: Tensor) -> dict[str, Callable[[], object]]:
    other = torch.empty_like(x)
    shared, gloo = groups["shared memory"], groups["gloo"]
    return {
        "shared memory": lambda: shared.all_reduce(x, "all-reduce"),
        "gloo": lambda: gloo.all_reduce(x, "all-reduce"),
        "torch.distributed": lambda: dist.all_reduce(x),
        "copy": lambda: other.copy_(x),
    }


def measured(groups: dict[str, Group], repeats: int) -> dict[tuple[str, int], list[float]]:
    """Seconds by way and size; each size is measured in all ways before the next one."""
    found = {}
    for size_bytes in SIZES_BYTES:
        for name, run in ways(groups, torch.zeros(size_bytes // 2, dtype=torch.bfloat16)).items():
            run()
            start = time.perf_counter()
            run()
            once = torch.tensor([time.perf_counter() - start])
            dist.broadcast(once, 0)  # all ranks must run as many
            count = max(1, min(200, int(BATCH_S / float(once))))
            dist.barrier()
            found[name, size_bytes] = seconds(run, max(20, min(repeats, int(1.5 / count / float(once)))), count)
    return found


def work(rank: int, size: int, store: str, repeats: int, results: Any) -> None:
    torch.set_num_threads(1)
    meeting = dist.FileStore(store, size)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    groups = {"shared memory": make_group(timeout_s=60), "gloo": make_group(timeout_s=60, shared_memory=False)}
    assert all(group.describe() == name for name, group in groups.items()), groups["shared memory"].why_not_shared
    found = measured(groups, repeats)
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def table(found: dict[tuple[str, int], list[float]], size: int) -> Table:
    rows = Table(
        "bytes of bfloat16",
        "way",
        "median",
        "5 % to 95 %",
        "bound",
        "reached",
        "of torch.distributed's time",
        title=f"all-reduce over {size} ranks × 1 thread; kernels: {isa()}",
        title_justify="left",
    )
    for size_bytes in SIZES_BYTES:
        # Each rank copies what is not its share, adds up its share, and copies the others' sums.
        bound = median(found["copy", size_bytes]) * (1 + 2 * (size - 1) / size)
        theirs = median(found["torch.distributed", size_bytes])
        for name in WAYS:
            times = found[name, size_bytes]
            low, *_, high = quantiles(times, n=20)
            rows.add_row(
                f"{size_bytes:,}",
                name,
                f"{median(times) * 1e6:.1f} us",
                f"{low * 1e6:.1f} to {high * 1e6:.1f} us",
                f"{bound * 1e6:.1f} us",
                f"{bound / median(times):.0%}",
                f"{median(times) / theirs:.2f}",
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=300)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (args.ranks, f"{folder}/store", args.repeats, results)
        processes = [context.Process(target=work, args=(rank, *arguments)) for rank in range(args.ranks)]
        for process in processes:
            process.start()
        found = results.get(timeout=300)
        for process in processes:
            process.join()
    console = Console(width=140)
    console.print(f"python {' '.join(sys.argv)}  ({platform.system()} {platform.machine()}, torch {torch.__version__})")
    console.print(table(found, args.ranks))


if __name__ == "__main__":
    main()
