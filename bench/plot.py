"""Draw the figures that bench/models.py and bench/peers.py write with --json, each beside its bound.

    python bench/plot.py FIGURES.json --out docs/figures/cpu.svg
    python bench/plot.py FIGURES.json --by-bits --out docs/peers.svg

Needs matplotlib. Bars are tokens per second; the line on a bar is what the named bound of this row allows. With
--by-bits, engines with weights of as many bits stand together, with the number at each bar and without bounds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

OURS, OTHERS = "#2563eb", "#9ca3af"
BITS = {
    "bf16": 16, "BF16": 16, "int8": 8, "int8:a8": 8, "Q8_0": 8, "int4": 4, "int4:a8": 4, "Q4_0": 4, "Q4_K_M": 4,
}  # fmt: skip
SHOWN = {"openvino": "OpenVINO"}  # names of bench/peers.py, as their authors write them


def draw(figures: dict[str, Any], out: Path) -> None:
    rows, batches = figures["rows"][::-1], list(figures["rows"][0]["step_s"])  # bars begin at the bottom
    matplotlib.rcParams.update({"svg.hashsalt": "infuse", "font.size": 8})  # the same figures give the same file
    titles = ["prefill, relative to the first row", *(f"decode, {batch} at once, tokens/s" for batch in batches)]
    figure, axes = pyplot.subplots(1, len(titles), figsize=(3.4 * len(titles), 0.6 + 0.26 * len(rows)), sharey=True)
    for axis, title, batch in zip(axes, titles, ["prefill", *batches], strict=True):
        for at, row in enumerate(rows):
            taken = row["prefill_s"] if batch == "prefill" else row["step_s"][batch]
            scale = rows[-1]["prefill_s"] if batch == "prefill" else float(batch)
            is_ours = row["name"].startswith("infuse")
            axis.barh(at, scale / taken, color=OURS if is_ours else OTHERS, height=0.7)
            if is_ours:
                seconds, by = row["bounds"][batch]
                axis.plot([scale / seconds] * 2, [at - 0.4, at + 0.4], color="black", linewidth=1)
                axis.annotate(by, (scale / seconds, at), xytext=(3, 0), textcoords="offset points", va="center", size=6)
        axis.set_title(title, size=8)
        axis.margins(x=0.2)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(rows)), [row["name"] for row in rows])
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def draw_by_bits(figures: dict[str, Any], prompt_tokens: int, out: Path) -> None:
    """Draw tokens per second while decoding and while reading a prompt, one group of bars for each number of bits."""
    rows = sorted(figures["rows"], key=lambda row: -BITS[_format(row)])  # as in the file within a group
    bits = [BITS[_format(row)] for row in rows]
    places = [-(index + 0.8 * len(set(bits[: index + 1]))) for index in range(len(rows))]  # a gap before each group
    panels = {f"reading a prompt of {prompt_tokens}": [prompt_tokens / row["prefill_s"] for row in rows]}
    for batch in reversed(rows[0]["step_s"]):
        title = "decoding, one text" if batch == "1" else f"decoding, {batch} at once"
        panels = {title: [int(batch) / row["step_s"][batch] for row in rows], **panels}
    # Text stays text, so that the same figures give the same file whatever fonts there are.
    matplotlib.rcParams.update({"svg.hashsalt": "infuse", "svg.fonttype": "none", "font.size": 9})
    height = 0.7 + 0.24 * (places[0] - places[-1])
    figure, axes = pyplot.subplots(1, len(panels), figsize=(10, height), sharey=True)
    colours = [OURS if row["name"].startswith("infuse") else OTHERS for row in rows]
    for axis, (title, speeds) in zip(axes, panels.items(), strict=True):
        axis.barh(places, speeds, color=colours, height=0.8)
        digits = 1 if max(speeds) < 100 else 0
        for place, speed in zip(places, speeds, strict=True):
            at = {"xytext": (3, 0), "textcoords": "offset points", "va": "center"}
            axis.annotate(f"{speed:.{digits}f}", (speed, place), size=8, **at)
        axis.set_title(title, size=9)
        axis.set_xticks([])
        axis.margins(x=0.16, y=0.02)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    axes[0].set_yticks(places, [_label(row["name"]) for row in rows])
    machine = figures["machine"].partition(";")[0]
    figure.suptitle(f"tokens per second, longer is faster: {figures['title']} on {machine}", size=9, x=0.01, ha="left")
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def _format(row: dict[str, Any]) -> str:
    return row["name"].rpartition(" ")[2]


def _label(name: str) -> str:
    engine, _, format = name.rpartition(" ")
    return f"{SHOWN.get(engine, engine)} {format}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path)
    parser.add_argument("--by-bits", action="store_true", help="group engines by the bits of their weights")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="with --by-bits: as bench/peers.py --prefill")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    figures = json.loads(args.figures.read_text())
    if args.by_bits:
        draw_by_bits(figures, args.prompt_tokens, args.out)
    else:
        draw(figures, args.out)


if __name__ == "__main__":
    main()
