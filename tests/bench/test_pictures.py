"""bench/pictures.py: the pictures of the documentation are those of the recorded times."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))

import picture_formats  # noqa: E402
from pictures import COLOURS, picture  # noqa: E402
from tests.diffusion.tiny_pipelines import made  # noqa: E402

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


def test_formats_of_a_whole_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """bench/picture_formats.py, on a small pipeline: bytes shrink, errors are those of the formats, steps take time."""
    monkeypatch.setattr(picture_formats, "DTYPE", torch.float32)
    pipe = made("sd15")
    exact = picture_formats.both(pipe, 64, 2)
    found = {}
    for name, make in picture_formats.versions(["bfloat16", "int8:8"], pipe, "off").items():
        version, held = make()
        found[name] = held, picture_formats.errors(version, 64, 2, (exact[0], exact[1] + 1e-9))[0]
        step, whole = picture_formats.timed(version, 64, 2)
        assert 0 < step < whole
    assert found["diffusers"][1] == 0 and found["bfloat16"][1] < 1e-4  # the name stands for the dtype, here float32
    assert found["int8:8"][0] < found["bfloat16"][0] and 1e-4 < found["int8:8"][1] < 0.2
