"""Ranks against threads: N ranks of one thread each, and one process of N threads, in turns on the same machine.

    python bench/tensor_parallel.py [--ranks 2] [--shape llama-1b] [--dtype bfloat16] [--quant int8] [--out
    bench/results/FILE.md]

Each contestant lives in processes of its own, which wait while the other one runs. Random weights of a real shape.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from rich.table import Table

from report import markdown, memory_bytes, show

WAYS = ("threads", "ranks")


def main() -> None:
    asked = arguments()
    pipes = {"threads": started(asked, 1, asked.ranks), "ranks": started(asked, asked.ranks, 1)}
    ready = {way: [pipe.recv() for pipe in found] for way, found in pipes.items()}
    seconds: dict[str, dict[str, list[float]]] = {way: {"prefill": [], "decode": []} for way in WAYS}
    for repeat in range(asked.repeats + 1):
        for way, found in pipes.items():
            for pipe in found:
                pipe.send("run")
            answers = [pipe.recv() for pipe in found]
            if repeat:  # the first turn warms up
                for what, times in seconds[way].items():
                    times.append(max(answer[what] for answer in answers))
    for found in pipes.values():
        for pipe in found:
            pipe.send("end")
    show(
        markdown(
            table(seconds, ready, asked), f"{ready['ranks'][0]['how']}; seconds are medians of {asked.repeats} turns"
        ),
        asked.out,
    )


def started(asked: argparse.Namespace, size: int, threads: int) -> list[Connection]:
    """A process for each rank of one contestant."""
    context = multiprocessing.get_context("spawn")
    store = tempfile.mktemp(prefix="infuse-bench-")
    os.environ["OMP_NUM_THREADS"] = str(threads)  # libraries read it when they are loaded
    pipes = []
    for rank in range(size):
        ours, theirs = context.Pipe()
        context.Process(target=work, args=(theirs, asked, rank, size, threads, store), daemon=True).start()
        pipes.append(ours)
    del os.environ["OMP_NUM_THREADS"]
    return pipes


def work(pipe: Connection, asked: argparse.Namespace, rank: int, size: int, threads: int, store: str) -> None:
    """One rank: loads, then runs whenever it is told to."""
    import torch.distributed as dist

    import infuse
    from models import SHAPES, made

    torch.set_num_threads(threads)
    if size > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    shape, dtype = SHAPES[asked.shape], getattr(torch, asked.dtype)
    settings: dict[str, Any] = {"quant": asked.quant} if asked.quant else {}
    model = made(shape, dtype)
    start = time.perf_counter()
    engine = infuse.init_inference(model, dtype=dtype, tensor_parallel={"tp_size": size}, **settings)
    seconds = time.perf_counter() - start
    pipe.send({"seconds": seconds, "how": engine.group.describe(), "peak_bytes": memory_bytes("VmHWM")})
    ids = torch.randint(shape["vocab_size"], (asked.batch, asked.prefill), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    while pipe.recv() == "run":
        times = []
        for tokens in (1, 1 + asked.new):
            begin = time.perf_counter()
            engine.generate(ids, attention_mask=mask, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens)
            times.append(time.perf_counter() - begin)
        pipe.send({"prefill": times[0], "decode": (times[1] - times[0]) / asked.new})


def table(
    seconds: dict[str, dict[str, list[float]]], ready: dict[str, list[dict[str, Any]]], asked: argparse.Namespace
) -> Table:
    title = f"{asked.shape}, {asked.quant or asked.dtype}, batch {asked.batch}, {asked.prefill} + {asked.new} tokens"
    made = Table(
        "",
        "prefill, s",
        "ratio",
        "decode, ms",
        "ratio",
        "spread",
        "init, s",
        "peak, GiB each",
        title=title,
        title_justify="left",
    )
    names = {"threads": f"1 process x {asked.ranks} threads", "ranks": f"{asked.ranks} ranks x 1 thread"}
    for way in WAYS:
        prefill, decode = (median(seconds[way][what]) for what in ("prefill", "decode"))
        base = [median(seconds["threads"][what]) for what in ("prefill", "decode")]
        low, *_, high = quantiles(seconds[way]["decode"], n=20) if len(seconds[way]["decode"]) > 1 else (decode, decode)
        made.add_row(
            names[way],
            f"{prefill:.3f}",
            f"{prefill / base[0]:.2f}",
            f"{decode * 1e3:.1f}",
            f"{decode / base[1]:.2f}",
            f"{low * 1e3:.1f} to {high * 1e3:.1f}",
            f"{max(one['seconds'] for one in ready[way]):.1f}",
            f"{max(one['peak_bytes'] for one in ready[way]) / 2**30:.2f}",
        )
    return made


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", default="llama-1b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quant")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prefill", type=int, default=128)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
