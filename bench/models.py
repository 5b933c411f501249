"""Whole models against transformers, in one process, interleaved: prefill, decode, host time, memory, load time.

    python bench/models.py [--shape llama-1b] [--dtypes bfloat16] [--out bench/results/FILE.md]

Random weights of a real shape; ratios within this run are what counts, beside the probed read bandwidth and matmul
rate.
"""

from __future__ import annotations

import argparse
import copy
import gc
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from rich.table import Table

import infuse
from infuse.plan.bytes import parameter_bytes
from infuse.profile.probe import Bandwidth, MemoryReader
from infuse_cli.bench import multiplications
from report import Bound, bound, in_turns, instruction, markdown, memory_bytes, probed, product_rates, save, show

# Llama-3.2-1B; and one whose arithmetic is nothing, so that what remains is host time.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-1b": dict(
        hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64,
        intermediate_size=8192, vocab_size=128256, tie_word_embeddings=True, max_position_embeddings=8192,
    ),
    "host": dict(
        hidden_size=64, num_hidden_layers=16, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
        vocab_size=256, max_position_embeddings=8192,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Contestant:
    """One way to run the model; `seconds_to_load` is what making it cost beyond the model itself."""

    name: str
    model: Any
    dtype: torch.dtype
    weight_bytes: int
    seconds_to_load: float


def made(shape: dict[str, Any], dtype: torch.dtype) -> Any:
    return random_model(transformers.LlamaForCausalLM, transformers.LlamaConfig(**shape), dtype)


def random_model(kind: type, config: Any, dtype: torch.dtype) -> Any:
    """The model with random weights in `dtype`; buffers stay float32, as from_pretrained leaves them."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = kind(config).eval()
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def contestants(shape: dict[str, Any], dtypes: list[torch.dtype], formats: list[str]) -> list[Contestant]:
    found = []
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        eager = made(shape, dtype)
        found.append(Contestant(f"transformers {name}", eager, dtype, parameter_bytes(eager), 0.0))
        for format in ("", *formats):
            model = copy.deepcopy(eager)
            start = time.perf_counter()
            engine = infuse.init_inference(model, dtype=dtype, **({"quant": format} if format else {}))
            seconds = time.perf_counter() - start
            found.append(Contestant(f"infuse {format or name}", engine, dtype, parameter_bytes(engine.module), seconds))
    return found


def cache_bytes(shape: dict[str, Any], dtype: torch.dtype, tokens: int) -> int:
    """What a decode step reads of a cache that holds so many tokens of one row."""
    width = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    return 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * width * tokens * dtype.itemsize


def bounds(
    entry: Contestant,
    shape: dict[str, Any],
    products: int,
    args: argparse.Namespace,
    rates: dict[str, float],
    read: dict[int, float],
) -> dict[int, Bound]:
    """The bounds of a step, by the rows of a batch, from the read bandwidth around it; 0: of the prefill.

    `products`: multiplications of one token in the layers; its logits are as many as the embedding has values.
    """
    by, logits = instruction(entry.name, rates), shape["vocab_size"] * shape["hidden_size"]
    found = {0: bound(entry.weight_bytes, read[1], 2 * (products * args.prefill + logits), rates, by)}
    for rows, bandwidth in read.items():
        step_bytes = entry.weight_bytes + rows * cache_bytes(shape, entry.dtype, args.context + args.new // 2)
        found[rows] = bound(step_bytes, bandwidth, 2 * rows * (products + logits), rates, by)
    return found


def resident(pipe: Connection, shape: dict[str, Any], dtype: torch.dtype, format: str) -> None:
    """In a process of its own: the bytes of the weights, and the memory that stays after init_inference on a live
    model.
    """
    before = memory_bytes("VmRSS")
    engine = infuse.init_inference(made(shape, dtype), dtype=dtype, **({"quant": format} if format else {}))
    gc.collect()
    pipe.send((parameter_bytes(engine.module), memory_bytes("VmRSS") - before))


def residents(shape: dict[str, Any], dtype: torch.dtype, formats: list[str]) -> str:
    """One line: for each format what the weights take, and what is resident after init_inference on a live model."""
    context, told = multiprocessing.get_context("spawn"), []
    for format in formats:
        ours, theirs = context.Pipe()
        process = context.Process(target=resident, args=(theirs, shape, dtype, format))
        process.start()
        weights, stays = ours.recv()
        process.join()
        told.append(f"{format or str(dtype)[6:]} {stays / 2**30:.2f} GiB for {weights / 2**30:.2f} GiB of weights")
    return "resident after init_inference on a live model, in a fresh process: " + "; ".join(told)


def prefill(tokens: int) -> Callable[[Any], None]:
    ids = torch.randint(3, 250, (1, tokens))

    def run(model: Any) -> None:
        with torch.no_grad():
            model(input_ids=ids, use_cache=True, logits_to_keep=1)

    return run


class Clock:
    """A streamer that notes when each token comes."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def decode_steps(
    entries: list[Contestant], batch: int, context: int, new: int, repeats: int
) -> tuple[list[list[float]], list[Bandwidth]]:
    """Seconds from token to token while each contestant generates `new` of them, in turn; the first two are not
    counted.

    The read bandwidth is probed before and after each turn: other guests of a machine use its memory, some of the time.
    """
    reader = MemoryReader()
    passes: list[list[float]] = [[] for _ in entries]
    ids = torch.randint(3, 250, (batch, context))
    seconds: list[list[float]] = [[] for _ in entries]
    for _ in range(repeats):
        for i, entry in enumerate(entries):
            passes[i] += in_turns([reader], 5)[0]
            clock = Clock()
            inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids), streamer=clock)
            entry.model.generate(**inputs, max_new_tokens=new, do_sample=False)
            times = clock.times[3:]  # the prompt comes first
            seconds[i] += [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
            passes[i] += in_turns([reader], 5)[0]
    return seconds, [reader.bandwidth(of_entry) for of_entry in passes]


def whole_answers(
    entries: list[Contestant], batch: int, context: int, new: int, repeats: int
) -> tuple[list[float], list[Bandwidth]]:
    """Seconds a token of answers without a streamer: what `new` tokens after the first four take, in turn.

    The read bandwidth is probed before and after each turn.
    """
    few, reader = 4, MemoryReader()
    passes: list[list[float]] = [[] for _ in entries]
    ids = torch.randint(3, 250, (batch, context))
    seconds: list[dict[int, list[float]]] = [{few: [], few + new: []} for _ in entries]
    for _ in range(repeats):
        for i, entry in enumerate(entries):
            passes[i] += in_turns([reader], 5)[0]
            for tokens, found in seconds[i].items():
                start = time.perf_counter()
                inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
                entry.model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
                found.append(time.perf_counter() - start)
            passes[i] += in_turns([reader], 5)[0]
    each = [(median(found[few + new]) - median(found[few])) / new for found in seconds]
    return each, [reader.bandwidth(of_entry) for of_entry in passes]


def report(args: argparse.Namespace) -> str:
    shape = SHAPES[args.shape]
    entries = contestants(shape, [getattr(torch, name) for name in args.dtypes], args.formats)
    products, rates = multiplications(entries[0].model), product_rates()
    what = "ratios to the first row; share of the bound that is named: of an instruction in registers, or of the read "
    what += "bandwidth (GB/s) around the steps, of weights and cache"
    table = Table(title=f"{args.shape}, {args.context} + {args.new} tokens: {what}")
    headings = (
        "",
        f"prefill {args.prefill}, s",
        "x",
        "share",
        "batch 1, ms",
        "spread",
        "x",
        "GB/s",
        "share",
        f"batch {args.batch}, ms",
        "x",
        "share",
        "weights, GB",
        "init, s",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if not heading else "right")
    run = prefill(args.prefill)
    prefills = in_turns([partial(run, entry.model) for entry in entries], args.repeats)
    ones, bandwidths = decode_steps(entries, 1, args.context, args.new, args.repeats)
    many, around = decode_steps(entries, args.batch, args.context, args.new, args.repeats)
    first = [median(row[0]) for row in (prefills, ones, many)]
    rows = []
    for i, (entry, p, one, eight, bandwidth) in enumerate(zip(entries, prefills, ones, many, bandwidths, strict=True)):
        read = {1: bandwidth.median, args.batch: around[i].median}
        least = bounds(entry, shape, products, args, rates, read)
        row = {"name": entry.name, "prefill_s": median(p), "step_s": {1: median(one), args.batch: median(eight)}}
        named = {batch or "prefill": (bound.seconds, bound.by) for batch, bound in least.items()}
        rows.append({**row, "bounds": named, "weight_bytes": entry.weight_bytes})
        table.add_row(
            entry.name,
            f"{median(p):.3f}",
            f"{first[0] / median(p):.2f}",
            least[0].share(median(p)),
            f"{median(one) * 1e3:.2f}",
            f"{min(one) * 1e3:.2f}-{max(one) * 1e3:.2f}",
            f"{first[1] / median(one):.2f}",
            f"{bandwidth.median / 1e9:.1f}",
            least[1].share(median(one)),
            f"{median(eight) * 1e3:.2f}",
            f"{first[2] / median(eight):.2f}",
            least[args.batch].share(median(eight)),
            f"{entry.weight_bytes / 1e9:.2f}",
            f"{entry.seconds_to_load:.1f}",
        )
    best = max(bandwidths, key=lambda b: b.best)
    save(args.json, args.shape, rows, {"read": best.best, **rates})
    remarks = [probed(best, rates)]
    if args.memory:
        remarks += [residents(shape, getattr(torch, name), ["", *args.formats]) for name in args.dtypes]
    return markdown(table, "; ".join(remarks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-1b")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--formats", nargs="*", default=[])
    for name, value in dict(prefill=512, context=128, new=16, batch=8, repeats=3).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument(
        "--memory", action="store_true", help="what is resident after init_inference, each in a fresh process"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file, for bench/plot.py")
    parser.add_argument("--out", type=Path, help="append the report to this file")
    args = parser.parse_args()
    show(report(args), args.out)


if __name__ == "__main__":
    main()
