"""What number formats cost in quality: perplexity of a trained model on its held-out text, for each format, beside its
bits.

    python bench/quality.py [MODEL_DIR] [--tokens 4000] [--out bench/results/FILE.md] [--plot docs/quantization.svg]

Each model is made anew by infuse.init_inference and scored by examples/perplexity.py. The bits are those of the
quantized matrices, scales and zeros included; a table tied to the output layer stays as it is, and the plan of each run
says what else does.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers

import infuse
from infuse.cache.kv_cache import KVCache
from infuse.generate.loop import CACHE_NAME
from infuse.ground.device import cpu_features
from infuse.plan.formats import matrices_made, quantized_bytes
from infuse.plan.plan import Plan

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # the examples are no package of the environment
from examples.perplexity import total_nats  # noqa: E402

GROUPS = (32, 64, 128)
FORMATS = (
    "int8:row",
    *(f"int8:{size}{end}" for end in ("", ":asymmetric") for size in GROUPS),
    "fp8",
    *(f"fp8:{size}" for size in GROUPS),
    "fp6:row",
    *(f"fp6:{size}" for size in GROUPS),
    *(f"int4:{size}{end}" for end in ("", ":asymmetric") for size in GROUPS),
    *(f"{name}:{size}:a8" for name in ("int8", "int4") for size in GROUPS),
)
# The most that perplexity may grow against float32, in percent, for the formats that a short name stands for.
LIMITS: Mapping[str, float] = MappingProxyType(
    {"bfloat16": 0.1, "int8 cache": 0.2, "int8:64": 0.2, "fp8": 0.6, "fp6:64": 1.0, "int4:64": 4.0}
)
FAMILIES = ("int8 asymmetric", "int8", "int8 a8", "fp8", "fp6", "int4 asymmetric", "int4", "int4 a8", "bfloat16")


@dataclass(frozen=True)
class Score:
    """One format: bits per weight of its matrices, perplexity per token, and its increase over float32 in percent."""

    name: str
    bits: float
    perplexity: float
    change: float

    @property
    def family(self) -> str:
        name, *options = self.name.split(":")
        return " ".join([name, *(option for option in ("asymmetric", "a8") if option in options)])


def beginning(text: str, tokenizer: Any, tokens: int | None) -> str:
    """The part of a text that its first `tokens` tokens cover; None: all of it."""
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    return text if tokens is None or tokens >= len(offsets) else text[: offsets[tokens - 1][1]]


def bits(plan: Plan) -> float:
    """The mean bits of a weight of the matrices that are quantized; those of the dtype where none is."""
    held = weights = 0
    for step in plan.steps:
        if step.shares:  # an embedding looks up in the weight of a head, which is counted
            continue
        sizes = quantized_bytes(step.fills, step.shape)
        held += sum(sizes.values())
        made = matrices_made(step.fills, step.shape) if sizes else []
        weights += sum(math.prod(matrix.shape) for fill, matrix in made if fill.target in sizes)
    return 8 * held / weights if weights else 8.0 * plan.dtype.itemsize


def scores(folder: Path, text: str, formats: Sequence[str], dtype: str, window: int, stride: int) -> Iterator[Score]:
    """float32 first, then bfloat16, float32 over a KV cache in int8, then each format with activations in `dtype`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    exact = 0.0
    for name in ("float32", "bfloat16", "int8 cache", *formats):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        keys = dict(dtype=name) if name in ("float32", "bfloat16") else dict(dtype=dtype, quant=name)
        if name == "int8 cache":
            keys = dict(dtype="float32", kv_cache="int8")
        engine = infuse.init_inference(model, progress=False, **keys)
        scored = partial(over_int8_cache, engine) if name == "int8 cache" else engine
        nats, tokens = total_nats(scored, tokenizer, text, window, stride)
        found = math.exp(nats / tokens)
        exact = exact or found
        yield Score(name, bits(engine.plan), found, 100 * (found / exact - 1))


def over_int8_cache(engine: Any, ids: torch.Tensor) -> Any:
    """The model's output for ids whose keys and values go through a cache in int8."""
    return engine(ids, **{CACHE_NAME: KVCache(format="int8")})


def table(found: Sequence[Score]) -> str:
    """A row for each score, as Markdown."""
    lines = ["| format | bits a weight | perplexity | against float32 | allowed |", "|---|---|---|---|---|"]
    for score in found:
        limit = LIMITS.get(score.name)
        allowed = "" if limit is None else f"+{limit} %{'' if score.change <= limit else ', missed'}"
        lines.append(
            f"| {score.name} | {score.bits:.2f} | {score.perplexity:.4f} | {score.change:+.2f} % | {allowed} |"
        )
    return "\n".join(lines) + "\n"


def plot(found: Sequence[Score], path: Path, title: str) -> None:
    """Bits against perplexity, a line for each family of formats, as SVG."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update(
        {"svg.hashsalt": "infuse", "svg.fonttype": "none"}
    )  # equal from run to run; text stays text
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    exact = found[0]
    axes.axhline(exact.perplexity, color="0.5", linestyle="--", linewidth=1)
    axes.annotate(
        "float32",
        (1, exact.perplexity),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 4),
        textcoords="offset points",
        ha="right",
        color="0.4",
    )
    for family in FAMILIES:
        members = sorted((score for score in found[1:] if score.family == family), key=lambda score: score.bits)
        if members:
            axes.plot(
                [s.bits for s in members],
                [s.perplexity for s in members],
                marker="o",
                markersize=5,
                linewidth=1,
                label=family,
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks([4, 5, 6, 8, 16], ["4", "5", "6", "8", "16"])
    axes.minorticks_off()
    axes.set_xlabel("bits a weight, scales and zeros included")
    axes.set_ylabel("perplexity (lower is better)")
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", type=Path, nargs="?", default=ROOT / "examples" / "tiny_llama", help="folder with model and tokenizer"
    )
    parser.add_argument("--text", type=Path, help="text file (default: heldout.txt in the model's folder)")
    parser.add_argument("--tokens", type=int, help="score only that many tokens from the beginning")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), help="formats to score")
    parser.add_argument(
        "--dtype",
        default="float32",
        help="what activations are computed in beside quantized weights (default: float32)",
    )
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--stride", type=int, default=256)
    parser.add_argument("--out", type=Path, help="write the table to this file")
    parser.add_argument("--plot", type=Path, help="draw bits against perplexity into this SVG file (needs matplotlib)")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    text = beginning((args.text or args.model / "heldout.txt").read_text(encoding="utf-8"), tokenizer, args.tokens)
    found = []
    for score in scores(args.model, text, args.formats, args.dtype, args.window, args.stride):
        found.append(score)
        print(f"{score.name:<20} {score.bits:6.2f} bits  {score.perplexity:.4f}  {score.change:+.2f} %", flush=True)
    part = "all tokens" if args.tokens is None else f"the first {args.tokens} tokens"
    what = f"{args.model.name}, {part} of {args.text.name if args.text else 'heldout.txt'}"
    machine = (
        f"{platform.machine()}, {' '.join(cpu_features())}; torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )
    told = (
        f"{date.today()}: `python {' '.join(sys.argv)}`: {what}; quantized rows compute in {args.dtype}\n\n"
        f"{machine}\n\n{table(found)}"
    )
    print("\n" + told)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(told, encoding="utf-8")
    if args.plot:
        plot(found, args.plot, what)


if __name__ == "__main__":
    main()
