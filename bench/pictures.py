"""Draw where the time of models goes as bars in an SVG: `python bench/pictures.py times.json picture.svg`.

The file is what `bench/diffusion.py --shares --json` writes. Bars of one case have one scale, and parts one order.
"""

from __future__ import annotations

import json
import sys
from html import escape
from pathlib import Path
from typing import Any

COLOURS = {
    "convolution": "#4e79a7",
    "attention": "#e15759",
    "product": "#f28e2b",
    "norm": "#59a14f",
    "activation": "#b07aa1",
    "other": "#bab0ac",
}
WIDTH, LEFT, BAR, GAP = 640, 150, 16, 5


def picture(rows: list[dict[str, Any]]) -> str:
    """The rows of each case below its title, then the legend."""
    parts, y = [], 4
    for case in dict.fromkeys(row["case"] for row in rows):
        own = [row for row in rows if row["case"] == case]
        parts.append(_text(0, y + 12, case, bold=True))
        y += 18
        scale = (WIDTH - LEFT - 60) / max(row["ms"] for row in own)
        for row in own:
            parts.append(_text(0, y + 12, row["name"]))
            x = float(LEFT)
            for kind, colour in COLOURS.items():
                width = scale * row["ms"] * row["shares"].get(kind, 0.0)
                parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>')
                x += width
            parts.append(_text(x + 5, y + 12, f"{row['ms']:.0f} ms"))
            y += BAR + GAP
        y += 8
    x = 0
    for kind, colour in COLOURS.items():
        parts.append(f'<rect x="{x}" y="{y}" width="11" height="11" fill="{colour}"/>')
        parts.append(_text(x + 15, y + 10, kind))
        x += 105
    size = f'width="{WIDTH}" height="{y + 18}" viewBox="0 0 {WIDTH} {y + 18}"'
    style = 'font-family="sans-serif" font-size="12" fill="#777"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', *parts, "</svg>", ""])


def _text(x: float, y: int, text: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y}"{weight}>{escape(text)}</text>'


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.write_text(picture(json.loads(source.read_text(encoding="utf-8"))), encoding="utf-8")
