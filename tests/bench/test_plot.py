"""bench/plot.py: the picture of README has the recorded figures."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))

from plot import draw_by_bits  # noqa: E402

FIGURES = json.loads((ROOT / "bench" / "results" / "2026-11-30-peers.json").read_text(encoding="utf-8"))


def texts(picture: Path) -> list[str]:
    """All texts of a picture, in order."""
    return re.findall(r"<text [^>]*>([^<]+)</text>", picture.read_text(encoding="utf-8"))


def test_the_committed_picture_is_of_the_recorded_figures(tmp_path: Path) -> None:
    """Compared by its texts: other versions of matplotlib write other paths."""
    draw_by_bits(FIGURES, 512, tmp_path / "drawn.svg")
    found = texts(tmp_path / "drawn.svg")
    assert found == texts(ROOT / "docs" / "peers.svg")
    assert {"infuse int4", "OpenVINO int4", "llama.cpp Q4_0", "ik_llama.cpp Q4_0", "56.8", "35.0", "45.2"} <= set(found)


def test_the_figures_are_those_of_the_table() -> None:
    """The JSON has as seconds what the page beside it has as tokens per second."""
    page = (ROOT / "bench" / "results" / "2026-11-30-peers.md").read_text(encoding="utf-8")
    told = {
        name.lower(): cells for name, *cells in re.findall(r"^\| (\S+ \S+) \| (\S+) \| (\S+)[^|]* \| (\S+)", page, re.M)
    }
    for row in FIGURES["rows"]:
        speeds = [row["prefill_s"], 1 / row["step_s"]["1"], 8 / row["step_s"]["8"]]
        assert [f"{speed:.3g}" for speed in speeds] == [f"{float(cell):.3g}" for cell in told[row["name"].lower()]]
    assert len(told) == len(FIGURES["rows"])
