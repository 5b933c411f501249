"""bench/pictures.py: the pictures of the documentation are those of the recorded times."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "bench"))

from pictures import COLOURS, picture  # noqa: E402

TIMES = ROOT / "bench" / "results" / "2026-11-23-diffusion.json"


def test_the_committed_picture_is_of_the_recorded_times() -> None:
    drawn = picture(json.loads(TIMES.read_text(encoding="utf-8")))
    assert (ROOT / "docs" / "diffusion.svg").read_text(encoding="utf-8") == drawn
    assert len(drawn) < 20_000


def test_bars_are_as_long_as_the_times() -> None:
    shares = {"convolution": 0.75, "other": 0.25}
    rows = [dict(case="A & B", name=name, ms=ms, shares=shares) for name, ms in (("eager", 200.0), ("infuse", 100.0))]
    root = ElementTree.fromstring(picture(rows))
    bars = [one for one in root.iter("{http://www.w3.org/2000/svg}rect") if one.get("height") == "16"]
    widths = {
        kind: [float(one.get("width", 0)) for one in bars if one.get("fill") == colour]
        for kind, colour in COLOURS.items()
    }
    long, short = widths["convolution"]
    assert long == pytest.approx(2 * short, abs=0.2) and long == pytest.approx(3 * widths["other"][0], abs=0.3)
    assert short > 0 == widths["norm"][0]
