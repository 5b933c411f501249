"""Draw the figures that bench/models.py and bench/peers.py write with --json, each beside its bound.

    python bench/plot.py FIGURES.json --out docs/figures/cpu.svg

Needs matplotlib. Bars are tokens per second; the line on a bar is what the named bound of this row allows.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

OURS, OTHERS = "#2563eb", "#9ca3af"


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    draw(json.loads(args.figures.read_text()), args.out)


if __name__ == "__main__":
    main()
