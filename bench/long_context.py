"""Long contexts: the prefill of a long prompt, and decode steps over a full cache by the bytes that they read.

    python bench/long_context.py [--tokens 32768] [--layers 2] [--quant "" int8] [--new 60] [--out FILE.md]

Layers of the Llama-3.2-1B shape with random weights and a small vocabulary, so that two layers tell what each costs.
`generate` answers one prompt for each format of the weights and the cache. A pass over a buffer, whose bandwidth is the
bound, is timed between its steps.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table

import infuse
from infuse.cache.kv_cache import KVCache
from infuse.plan.bytes import parameter_bytes
from infuse.profile.probe import MemoryReader
from models import SHAPES, made
from report import in_turns, markdown, memory_bytes, show

VOCABULARY = 1024
PROBE_EVERY = 8  # steps; the step after a probe is not counted, since its weights and cache have been driven out


def cache_bytes(shape: dict[str, Any], tokens: int, format: str | None) -> int:
    """Of `tokens` tokens in bfloat16, or in `format`."""
    cache, one_block = KVCache(format=format), 64
    states = torch.randn(1, shape["num_key_value_heads"], one_block, shape["head_dim"]).bfloat16()
    cache.update(states, states, 0)
    return cache.nbytes() * shape["num_hidden_layers"] * tokens // one_block


class Clock:
    """A streamer that notes the seconds of each step and, in between, of a pass over memory."""

    def __init__(self, reader: MemoryReader):
        self.seconds: list[float] = []
        self.passes: list[float] = []
        self._reader, self._last, self._put = reader, 0.0, 0

    def put(self, tokens: object) -> None:
        self._put += 1
        if self._put % PROBE_EVERY == 0:
            self.passes += in_turns([self._reader], 1)[0]
        elif self._put % PROBE_EVERY > 1 and self._put > PROBE_EVERY:  # the first steps find how to go on
            self.seconds.append(time.perf_counter() - self._last)
        self._last = time.perf_counter()

    def end(self) -> None:
        pass


def report(args: argparse.Namespace) -> tuple[Table, str]:
    shape = SHAPES["llama-1b"] | dict(
        num_hidden_layers=args.layers, vocab_size=VOCABULARY, max_position_embeddings=2 * args.tokens
    )
    rows = Table(
        "weights, cache",
        "prompt, s",
        "tokens/s",
        "more memory at the peak, MB",
        "ms a step",
        "MB read",
        "GB/s",
        "of the read bandwidth, GB/s",
    )
    reader = MemoryReader()
    ids = torch.randint(3, VOCABULARY, (1, args.tokens))
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False)
    for quant in args.quant:
        for cache in (None, "int8"):
            engine = infuse.init_inference(
                made(shape, torch.bfloat16),
                dtype=torch.bfloat16,
                verify="off",
                progress=False,
                quant=quant or {},
                **({"kv_cache": cache} if cache else {}),
            )
            Path("/proc/self/clear_refs").write_text("5")  # the peak is the present size again
            before = memory_bytes("VmRSS")
            start = time.perf_counter()
            engine.generate(**inputs, max_new_tokens=1)
            prompt, more = time.perf_counter() - start, memory_bytes("VmHWM") - before
            clock = Clock(reader)
            engine.generate(**inputs, max_new_tokens=args.new, streamer=clock)
            step, bandwidth = median(clock.seconds), reader.bandwidth(clock.passes)
            # the head's weight is the embedding's
            read_bytes = parameter_bytes(engine.module) + cache_bytes(shape, args.tokens, cache)
            rows.add_row(
                f"{quant or 'bfloat16'}, {cache or 'bfloat16'}",
                f"{prompt:.1f}",
                f"{args.tokens / prompt:,.0f}",
                f"{more / 1e6:,.0f}",
                f"{1e3 * step:.2f}",
                f"{read_bytes / 1e6:.0f}",
                f"{read_bytes / step / 1e9:.1f}",
                f"{read_bytes / step / bandwidth.median:.2f} of {bandwidth.median / 1e9:.1f}",
            )
            del engine
    return rows, f"{args.tokens} tokens, {args.layers} layers; probed by {bandwidth.reader}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--quant", nargs="+", default=["", "int8"], help='formats of the weights; "": bfloat16')
    parser.add_argument("--new", type=int, default=60, help="tokens of each answer")
    parser.add_argument("--out", type=Path, help="append the report to this file")
    args = parser.parse_args()
    if args.new < 2 * PROBE_EVERY + 2:
        parser.error(f"--new: at least {2 * PROBE_EVERY + 2}, since every {PROBE_EVERY} steps memory is probed")
    rows, remarks = report(args)
    show(markdown(rows, remarks), args.out)


if __name__ == "__main__":
    main()
