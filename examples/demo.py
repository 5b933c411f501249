"""The main job on real input: the bundled model completes a prompt before and after injection, side by side.

python examples/demo.py ["def parse("]
"""

from __future__ import annotations

import copy
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

import infuse

MODEL = Path(__file__).parent / "tiny_llama"
PROMPT = "    def __repr__(self):\n"
PENALTY = 1.15  # of tokens that are there already: small models repeat themselves
NEW_TOKENS, REPEATS = 64, 5


def completed(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The prompt and its greedy completion, token ids [1, T]."""
    return model.generate(
        **inputs, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, repetition_penalty=PENALTY
    )


def tokens_per_second(models: dict[str, Any], inputs: dict[str, torch.Tensor]) -> dict[str, float]:
    """The median over interleaved runs of all models, so that a drifting machine is fair to each."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for repeat in range(REPEATS + 1):
        for name, model in models.items():
            start = time.perf_counter()
            completed(model, inputs)
            if repeat:  # the first run warms up
                seconds[name].append(time.perf_counter() - start)
    return {name: NEW_TOKENS / median(taken) for name, taken in seconds.items()}


def main() -> None:
    console = Console()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    original = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    inputs = dict(tokenizer(sys.argv[1] if len(sys.argv) > 1 else PROMPT, return_tensors="pt"))
    inputs.pop("token_type_ids", None)

    engine = infuse.init_inference(copy.deepcopy(original), dtype=torch.float32)
    console.rule("the plan")
    console.print(str(engine.plan), highlight=False, soft_wrap=True)

    texts = [tokenizer.decode(completed(model, inputs)[0], skip_special_tokens=True) for model in (original, engine)]
    table = Table(title="the same prompt, completed", show_lines=True)
    table.add_column("before (transformers)")
    table.add_column("after (infuse)")
    table.add_row(*(text.replace("[", r"\[") for text in texts))
    console.print(table)
    console.print("identical text" if texts[0] == texts[1] else "[red]THE TEXTS DIFFER[/red]")

    default = infuse.init_inference(copy.deepcopy(original))
    dtype = str(default.plan.dtype).removeprefix("torch.")
    eager = copy.deepcopy(original).to(default.plan.dtype)
    models = {
        "transformers float32": original,
        "infuse float32": engine,
        f"transformers {dtype}": eager,
        f"infuse {dtype}": default,
    }
    speeds = tokens_per_second(models, inputs)
    table = Table(title=f"decoding, batch 1, {NEW_TOKENS} new tokens, {torch.get_num_threads()} threads")
    for column in ("", "tokens/s", "times transformers float32", "times transformers of the same dtype"):
        table.add_column(column, justify="left" if not column else "right")
    for name, speed in speeds.items():
        same = speeds[f"transformers {name.rpartition(' ')[2]}"]
        table.add_row(name, f"{speed:,.0f}", f"{speed / speeds['transformers float32']:.2f}", f"{speed / same:.2f}")
    console.print(table)
    if texts[0] != texts[1]:
        sys.exit(1)


if __name__ == "__main__":
    main()
