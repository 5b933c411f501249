"""Long contexts: a decode step over a full cache, by the bytes that it reads, and the prefill of a long prompt.

    python bench/long_context.py [--tokens 32768] [--layers 2] [--quant "" int8] [--prefill 0] [--out FILE.md]

Layers of the Llama-3.2-1B shape with random weights and a small vocabulary, so that two layers tell what each costs.
The cache is filled with random values. All variants take turns with a pass over a buffer, whose bandwidth is the bound.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table

import infuse
from infuse.layers.cache import KVCache
from infuse.plan.bytes import parameter_bytes
from infuse.profile.probe import MemoryReader
from models import SHAPES, made
from report import in_turns, markdown, memory_bytes, show

VOCABULARY = 1024


def filled(shape: dict[str, Any], tokens: int, format: str | None, dtype: torch.dtype) -> KVCache:
    """A cache that holds `tokens` tokens of one row, with room for one more."""
    cache = KVCache(tokens + 1, format=format)
    for layer in range(shape["num_hidden_layers"]):
        states = (torch.randn(1, shape["num_key_value_heads"], tokens, shape["head_dim"]).to(dtype) for _ in "kv")
        cache.update(*states, layer)
    return cache


@torch.inference_mode()
def step(model: Any, cache: KVCache, tokens: int) -> None:
    """One decode step at position `tokens`, which the next one overwrites."""
    model(torch.tensor([[3]]), past_key_values=cache, position_ids=torch.tensor([[tokens]]), use_cache=True)
    cache.crop(-1)


def decode_report(shape: dict[str, Any], engines: dict[str, Any], args: argparse.Namespace) -> tuple[Table, str]:
    runs: dict[str, tuple[Any, float]] = {}
    for name, engine in engines.items():
        for format in (None, "int8"):
            cache = filled(shape, args.tokens, format, torch.bfloat16)
            read_bytes = parameter_bytes(engine.module) + cache.nbytes()  # the head's weight is the embedding's
            runs[f"{name}, cache {format or 'bfloat16'}"] = (partial(step, engine, cache, args.tokens), read_bytes)
    reader = MemoryReader()
    seconds = in_turns([*(run for run, _ in runs.values()), reader], args.repeats)
    bandwidth = reader.bandwidth(seconds[-1])
    rows = Table("weights, cache", "ms a step", "MB read", "GB/s", "of the read bandwidth")
    for (name, (_, read_bytes)), own in zip(runs.items(), seconds, strict=False):
        rate = read_bytes / median(own)
        rows.add_row(
            name, f"{1e3 * median(own):.2f}", f"{read_bytes / 1e6:.0f}", f"{rate / 1e9:.1f}",
            f"{rate / bandwidth.median:.2f} (best step and pass: {read_bytes / min(own) / bandwidth.best:.2f})",
        )  # fmt: skip
    told = f"read {bandwidth.best / 1e9:.1f} GB/s (median {bandwidth.median / 1e9:.1f}) by {bandwidth.reader}"
    return rows, f"decode at {args.tokens} tokens, {shape['num_hidden_layers']} layers; probed: {told}"


def prefill_report(shape: dict[str, Any], engines: dict[str, Any], args: argparse.Namespace) -> tuple[Table, str]:
    """A prompt of `args.prefill` tokens by generate: seconds, and the memory that it takes beyond the weights."""
    rows = Table("weights", "prompt", "s", "tokens/s", "more memory at the peak, MB")
    for name, engine in engines.items():
        ids = torch.randint(3, VOCABULARY, (1, args.prefill))
        Path("/proc/self/clear_refs").write_text("5")  # the peak is the present size again
        before = memory_bytes("VmRSS")
        start = time.perf_counter()
        engine.generate(ids, max_new_tokens=1, do_sample=False)
        took, more = time.perf_counter() - start, memory_bytes("VmHWM") - before
        rows.add_row(name, str(args.prefill), f"{took:.2f}", f"{args.prefill / took:,.0f}", f"{more / 1e6:,.0f}")
    return rows, f"prefill, {shape['num_hidden_layers']} layers"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--quant", nargs="+", default=["", "int8"], help='formats of the weights; "": bfloat16')
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--prefill", type=int, default=0, help="tokens of a prompt to measure instead")
    parser.add_argument("--out", type=Path, help="append the report to this file")
    args = parser.parse_args()
    shape = SHAPES["llama-1b"] | dict(
        num_hidden_layers=args.layers, vocab_size=VOCABULARY, max_position_embeddings=2 * args.tokens
    )
    engines = {
        quant or "bfloat16": infuse.init_inference(
            made(shape, torch.bfloat16), dtype=torch.bfloat16, verify="off", progress=False, quant=quant or {}
        )
        for quant in args.quant
    }
    rows, remarks = (prefill_report if args.prefill else decode_report)(shape, engines, args)
    show(markdown(rows, remarks), args.out)


if __name__ == "__main__":
    main()
