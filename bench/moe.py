"""Mixtures of experts against transformers' grouped form, in one process, interleaved: prefill, decode, init.

    python bench/moe.py [--shape small qwen3-30b-layer] [--formats int8 int4 int8:a8] [--peers] [--out FILE.md]
    python bench/moe.py --init [--shape small]      # init alone, beside a dense model of the same bytes

Random weights. A step's bound is the bytes that it uses, at the read bandwidth probed around it: of the experts, those
that the routes of all rows are expected to hit. Steps are timed from token to token by a streamer, as users see them;
"no streamer" is what a token of an answer takes that nobody watches.
"""

from __future__ import annotations

import argparse
import copy
import time
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from rich.table import Table

import infuse
from infuse.plan.bytes import parameter_bytes
from infuse.profile.probe import matmul_rate
from infuse.quant.parse import quant_format
from models import Contestant, cache_bytes, decode_steps, prefill, random_model, whole_answers
from other_engines.llama import BYTES, LlamaCpp, missing, write
from report import in_turns, markdown, probed, show

DTYPE = torch.bfloat16
SHAPES: dict[str, dict[str, Any]] = {
    "small": dict(
        hidden_size=1024, num_hidden_layers=12, num_experts=32, num_experts_per_tok=8, moe_intermediate_size=512,
        num_attention_heads=16, num_key_value_heads=4, head_dim=64, vocab_size=32000, max_position_embeddings=8192,
    ),
    "qwen3-30b-layer": dict(
        hidden_size=2048, num_hidden_layers=1, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=1024, max_position_embeddings=8192,
    ),
}  # fmt: skip


def made(shape: dict[str, Any]) -> Any:
    config = transformers.Qwen3MoeConfig(**shape, norm_topk_prob=True, experts_implementation="grouped_mm")
    return random_model(transformers.Qwen3MoeForCausalLM, config, DTYPE)


def contestants(shape: dict[str, Any], formats: list[str]) -> list[Contestant]:
    eager = made(shape)
    found = [Contestant("transformers bf16", eager, DTYPE, parameter_bytes(eager), 0.0)]
    for format in ("", *formats):
        model = copy.deepcopy(eager)
        start = time.perf_counter()
        engine = infuse.init_inference(model, dtype=DTYPE, **({"quant": format} if format else {}))
        seconds = time.perf_counter() - start
        found.append(Contestant(f"infuse {format or 'bf16'}", engine, DTYPE, parameter_bytes(engine.module), seconds))
    return found


def peers(shape: dict[str, Any], rows: int, tokens: int) -> list[Contestant]:
    """llama.cpp in its formats."""
    found = []
    for format in BYTES:
        with TemporaryDirectory() as folder:
            path = Path(folder, "model.gguf")
            write(shape, format, path)
            start = time.perf_counter()
            model = LlamaCpp(path, rows, tokens)  # which maps the file
            seconds = time.perf_counter() - start
            found.append(Contestant(f"llama.cpp {format}", model, DTYPE, path.stat().st_size, seconds))
    return found


def step_bytes(shape: dict[str, Any], entry: Contestant, batch: int, tokens: int) -> float:
    """What a step over `batch` rows reads: caches, and all weights but the embedding's and those of experts not hit."""
    width, inner, experts = shape["hidden_size"], shape["moe_intermediate_size"], shape["num_experts"]
    format = entry.name.split()[-1]
    if format in ("bf16", *BYTES):
        expert = 3 * width * inner * BYTES.get(format, DTYPE.itemsize)
    else:
        expert = quant_format(format).nbytes(2 * inner, width) + quant_format(format).nbytes(width, inner)
    missed = experts * (1 - shape["num_experts_per_tok"] / experts) ** batch
    embedding = shape["vocab_size"] * width * DTYPE.itemsize
    cached = batch * cache_bytes(shape, DTYPE, tokens)
    return entry.weight_bytes - embedding - shape["num_hidden_layers"] * missed * expert + cached


def report(shape: dict[str, Any], name: str, args: argparse.Namespace) -> str:
    entries, rate = contestants(shape, args.formats), matmul_rate(DTYPE)
    why = missing() if args.peers else None
    if args.peers and why is None:
        entries += peers(shape, args.batch, max(args.context + args.new, args.context + args.answer + 4, args.prefill))
    run = prefill(args.prefill)
    prefills = in_turns([partial(run, entry.model) for entry in entries], args.repeats)
    decodes = [decode_steps(entries, batch, args.context, args.new, args.repeats) for batch in (1, args.batch)]
    answers, around = whole_answers(entries, 1, args.context, args.answer, args.repeats)
    what = "ratios to the first row; share of the read bandwidth probed around the steps, of the bytes used"
    table = Table(title=f"{name}, {args.context} + {args.new} tokens: {what}")
    steps = [heading for b in (1, args.batch) for heading in (f"batch {b}, ms", "spread", "x", "share")]
    whole = ("no streamer, ms", "x", "share")
    for heading in ("", f"prefill {args.prefill}, s", "x", *steps, *whole, "weights, GB", "init, s"):
        table.add_column(heading, justify="left" if not heading else "right")
    for i, entry in enumerate(entries):
        row = [entry.name, f"{median(prefills[i]):.3f}", f"{median(prefills[0]) / median(prefills[i]):.2f}"]
        for batch, (seconds, bandwidths) in zip((1, args.batch), decodes, strict=True):
            middle, read = median(seconds[i]), bandwidths[i].median
            share = step_bytes(shape, entry, batch, args.context + args.new // 2) / middle / read
            row += [f"{middle * 1e3:.2f}", f"{min(seconds[i]) * 1e3:.2f}-{max(seconds[i]) * 1e3:.2f}"]
            row += [f"{median(seconds[0]) / middle:.2f}", f"{share:.2f}"]
        share = step_bytes(shape, entry, 1, args.context + args.answer // 2) / answers[i] / around[i].median
        row += [f"{answers[i] * 1e3:.2f}", f"{answers[0] / answers[i]:.2f}", f"{share:.2f}"]
        table.add_row(*row, f"{entry.weight_bytes / 1e9:.2f}", f"{entry.seconds_to_load:.1f}")
    best = max((bandwidth for _, bandwidths in decodes for bandwidth in bandwidths), key=lambda b: b.best)
    remarks = [probed(best, {DTYPE: rate}), *([why] if why else [])]
    return markdown(table, "; ".join(remarks))


def init_report(shape: dict[str, Any], name: str, args: argparse.Namespace) -> str:
    """Init of the mixture and of a dense model whose MLP is as wide as all experts together, in turns."""
    inner = shape["num_experts"] * shape["moe_intermediate_size"]
    of_both = {key: value for key, value in shape.items() if "expert" not in key and not key.startswith("moe")}
    config = transformers.Qwen3Config(**of_both, intermediate_size=inner)
    models = {"mixture": made(shape), "dense": random_model(transformers.Qwen3ForCausalLM, config, DTYPE)}
    table = Table(title=f"{name}: init, s; median of {args.repeats} in turns")
    for heading in ("", "verify", *models, "spread", "spread"):
        table.add_column(heading, justify="left" if not heading else "right")
    for format in ("", *args.formats):
        for verify in ("sample", "off"):
            seconds: dict[str, list[float]] = {kind: [] for kind in models}
            for _ in range(args.repeats):
                for kind, model in models.items():
                    copied = copy.deepcopy(model)
                    start = time.perf_counter()
                    infuse.init_inference(copied, dtype=DTYPE, verify=verify, **({"quant": format} if format else {}))
                    seconds[kind].append(time.perf_counter() - start)
            spreads = [f"{min(found):.2f}-{max(found):.2f}" for found in seconds.values()]
            table.add_row(format or "bf16", verify, *(f"{median(found):.2f}" for found in seconds.values()), *spreads)
    sizes = (f"{kind}: {parameter_bytes(model) / 1e9:.2f} GB" for kind, model in models.items())
    return markdown(table, ", ".join(sizes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=["small"])
    parser.add_argument("--formats", nargs="*", default=["int8", "int4", "int8:a8"])
    for name, value in dict(prefill=512, context=128, new=16, answer=48, batch=8, repeats=3).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--peers", action="store_true", help="llama.cpp too, if its packages are there")
    parser.add_argument("--init", action="store_true", help="only init, beside a dense model of the same bytes")
    parser.add_argument("--out", type=Path, help="append the report to this file")
    args = parser.parse_args()
    for name in args.shape:
        show((init_report if args.init else report)(SHAPES[name], name, args), args.out)


if __name__ == "__main__":
    main()
