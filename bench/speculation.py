"""Speculation: tokens a step on real text, and what they gain with the step times of a model of 1 B parameters.

    python bench/speculation.py [--part text steps] [--sample] [--out bench/results/FILE.md]

Text: the bundled model continues code whose beginning its prompt repeats; each call's tokens are counted, and the time
is measured too. Steps: times of the Llama-3.2-1B shape by the number of tokens. The ratio to plain decoding is computed
from both: the steps that the text took, at these times.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from rich.table import Table

import infuse
from infuse.cache.kv_cache import KVCache
from infuse.generate.loop import CACHE_NAME
from infuse.native import limits
from infuse.profile.probe import MemoryReader
from models import SHAPES
from report import in_turns, markdown, probed, show

FOLDER = Path(__file__).parent.parent / "examples" / "tiny_llama"
CONTEXT, REPEATED = 400, 32  # tokens of a prompt: text, then its beginning once more
DRAFTED = 4  # tokens of a draft


@dataclass
class Way:
    """One way to decode. `target` and `draft` hold the tokens of each call after the prompt."""

    name: str
    format: str = ""  # of the draft
    asked: dict[str, Any] = field(default_factory=dict)
    target: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)


def bundled(format: str) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER)
    model.generation_config.update(num_assistant_tokens=DRAFTED, assistant_confidence_threshold=0.0)
    return infuse.init_inference(model, dtype="bf16", quant=format or None, verify="off").module


def ways() -> list[Way]:
    most = limits().few_tokens - 1
    found = [Way("plain"), Way(f"lookup {most}", asked={"prompt_lookup_num_tokens": most})]
    for format in ("int8", "int4"):
        found.append(Way(f"draft: itself in {format}", format, {"assistant_model": bundled(format)}))
    return found


def prompts(count: int) -> list[torch.Tensor]:
    """Pieces of the held-out files, each followed by its beginning."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    ids = tokenizer((FOLDER / "heldout.txt").read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    starts = [len(ids) * (2 * n + 1) // (2 * count) for n in range(count)]
    return [torch.cat((ids[start : start + CONTEXT], ids[start : start + REPEATED]))[None] for start in starts]


def complete(model: Any, given: list[torch.Tensor], new: int, sample: bool, way: Way) -> list[torch.Tensor]:
    torch.manual_seed(1)
    more = {"do_sample": sample, "eos_token_id": None, "pad_token_id": 0, **way.asked}
    return [model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **more) for ids in given]


def count_calls(model: Any, given: list[torch.Tensor], new: int, sample: bool, all_ways: list[Way]) -> list[int]:
    """Fill in the tokens of each way's calls; return how many answers equal those of the first way."""

    def noted(into: list[int], module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if kwargs["input_ids"].shape[1] < REPEATED:
            into.append(kwargs["input_ids"].shape[1])

    equal, plain = [], []
    for way in all_ways:
        held = [model.register_forward_pre_hook(partial(noted, way.target), with_kwargs=True)]
        if helper := way.asked.get("assistant_model"):
            held.append(helper.register_forward_pre_hook(partial(noted, way.draft), with_kwargs=True))
        answers = complete(model, given, new, sample, way)
        for handle in held:
            handle.remove()
        plain = plain or answers
        equal.append(sum(torch.equal(*pair) for pair in zip(answers, plain, strict=True)))
    return equal


def shaped(format: str) -> Any:
    """The 1 B shape; its weights repeat a million random numbers, which takes less time than drawing them."""
    config = transformers.LlamaConfig(**SHAPES["llama-1b"])
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu").eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.tie_weights()
    values = (0.02 * torch.randn(1 << 20)).to(torch.bfloat16)
    with torch.no_grad():
        for weight in model.parameters():
            for piece in weight.view(-1).split(len(values)):
                piece.copy_(values[: len(piece)])
    return infuse.init_inference(model, dtype="bf16", quant=format or None, verify="off").module


class Step:
    """A step of `tokens` on a cache of CONTEXT tokens, which stay as many."""

    def __init__(self, model: Any, cache: KVCache, tokens: int):
        self.model, self.cache = model, cache
        self.ids = torch.arange(3, 3 + tokens)[None]
        self.positions = torch.arange(CONTEXT, CONTEXT + tokens)[None]

    @torch.inference_mode()
    def __call__(self) -> None:
        logits = self.model(self.ids, **{CACHE_NAME: self.cache}, position_ids=self.positions).logits
        logits.float().argmax(dim=-1).tolist()
        self.cache.crop(-self.ids.shape[1])


def step_seconds(format: str, tokens: list[int], repeats: int) -> dict[int, float]:
    """Seconds of a step by its tokens."""
    model, cache = shaped(format), KVCache(CONTEXT + max(tokens))
    with torch.inference_mode():
        model(torch.arange(3, 3 + CONTEXT)[None], **{CACHE_NAME: cache}, logits_to_keep=1)
    times = in_turns([Step(model, cache, count) for count in tokens], repeats)
    return {count: median(seconds) for count, seconds in zip(tokens, times, strict=True)}


def steps(repeats: int) -> tuple[Table, dict[str, dict[int, float]]]:
    most = limits().few_tokens
    counts = sorted({1, 2, 3, 4, DRAFTED + 1, (most + 1) // 2, most})
    table = Table(*("", *(f"{count}" for count in counts)), title="llama-1b: ms of a step by its tokens (x one token)")
    found = {}
    for format in ("", "int8", "int4"):
        found[format] = seconds = step_seconds(format, counts, repeats)
        gc.collect()
        cells = [f"{seconds[count] * 1e3:.1f} ({seconds[count] / seconds[1]:.2f})" for count in counts]
        table.add_row(format or "bf16", *cells)
    return table, found


def between(seconds: dict[int, float], tokens: int) -> float:
    """Seconds of a step of `tokens`, on the line between the nearest that were measured."""
    if tokens in seconds:
        return seconds[tokens]
    low, high = max(n for n in seconds if n < tokens), min(n for n in seconds if n > tokens)
    return seconds[low] + (seconds[high] - seconds[low]) * (tokens - low) / (high - low)


def text(args: argparse.Namespace, found: dict[str, dict[int, float]]) -> Table:
    model, all_ways, given = bundled(""), ways(), prompts(args.prompts)
    equal = count_calls(model, given, args.new, args.sample, all_ways)
    seconds = in_turns([partial(complete, model, given, args.new, args.sample, way) for way in all_ways], args.repeats)
    prefill = median(in_turns([partial(complete, model, given, 1, args.sample, all_ways[0])], args.repeats)[0])
    columns = ["", "tokens a step", "of candidates", "drafts a step", "same answers", "bundled, tokens/s", "x"]
    table = Table(
        *columns,
        *(["llama-1b, x"] if found else []),
        title="bundled model in bf16, " + ("sampled" if args.sample else "greedy"),
    )
    decoded = len(given) * (args.new - 1)  # the first token comes with the prompt
    rates = [decoded / (median(of_way) - prefill) for of_way in seconds]
    for way, same, rate in zip(all_ways, equal, rates, strict=True):
        calls, candidates = len(way.target), sum(way.target) - len(way.target)
        row = [way.name, f"{decoded / calls:.2f}", f"{candidates / calls:.2f}", f"{len(way.draft) / calls:.2f}"]
        row += [f"{same} of {len(given)}", f"{rate:.0f}", f"{rate / rates[0]:.2f}"]
        if found:
            taken = sum(between(found[""], count) for count in way.target)
            taken += sum(between(found[way.format], count) for count in way.draft)
            row.append(f"{decoded * found[''][1] / taken:.2f}")
        table.add_row(*row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=("text", "steps"), default=["text", "steps"])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--sample", action="store_true", help="draw tokens (temperature 1, top-k 50)")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, help="file to append the report to")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    reader, found = MemoryReader(), {}
    passes = in_turns([reader], 5)[0]
    for part in sorted(args.part):  # steps before text, which uses them
        if part == "steps":
            table, found = steps(args.repeats)
            show(markdown(table, probed(reader.bandwidth(passes), {})), args.out)
    if "text" in args.part:
        show(markdown(text(args, found), probed(reader.bandwidth(passes), {})), args.out)


if __name__ == "__main__":
    main()
