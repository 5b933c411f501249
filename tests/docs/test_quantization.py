"""docs/quantization.md: its example prints what it says, its table is that of the formats; and the benchmark behind its
figures.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch
import transformers

from bench import quality
from infuse.quant.blocks import BLOCKS
from infuse.quant.integer import CLIPS, INT8_LARGEST, INT8_SPANS
from infuse.quant.parse import quant_format
from infuse.quant.tables import TABLES

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "quantization.md").read_text(encoding="utf-8")


def test_the_example_runs_and_prints_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    monkeypatch.chdir(ROOT)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, "docs/quantization.md", "exec"), {})  # noqa: S102
    lines = [" ".join(line.split()) for line in printed.getvalue().splitlines()]
    told = [
        " ".join(line.split()).removesuffix("…")
        for line in TEXT.splitlines()
        if line.startswith(("    block ", "    left "))
    ]
    assert len(told) == 3
    for line in told:
        assert any(found.startswith(line) for found in lines), (line, lines)


def test_the_table_is_that_of_the_formats() -> None:
    rows = re.findall(r"^\| `([\w:]+)` \| (?:`([\w:]+)`)? ?\| ([\d.]+) \| ([\d,]+) \| ([\d.]+) \|", TEXT, re.MULTILINE)
    assert {quant_format(row[0]).name for row in rows} == {"int8", "int4", "fp8", "fp6", "mxfp4"}
    for text, same, bits, held, error in rows:
        format = quant_format(text)
        assert not same or quant_format(same) == format
        assert int(held.replace(",", "")) == format.nbytes(4096, 4096)
        assert float(bits) == pytest.approx(format.nbytes(4096, 4096) * 8 / 4096**2, abs=0.006)
        assert float(error) == pytest.approx(format.expected_error, abs=5e-5)


def test_the_table_of_files_is_that_of_the_formats() -> None:
    rows = re.findall(r"^\| `([\w:]+)` \| [\w, -]+ \| (\d+)[\w, ]* \| ([\d.]+) \| ([\d.]+) \|$", TEXT, re.MULTILINE)
    assert {text for text, *_ in rows} == {*BLOCKS, *TABLES, "int4:128:offset", "int2:128:offset", "int3", "int2"}
    for text, inputs, bits, error in rows:
        format = quant_format(text)
        assert format.fits(int(inputs)) is None and format.fits(int(inputs) // 2)
        assert float(bits) == pytest.approx(format.nbytes(4096, 4096) * 8 / 4096**2, abs=0.006)
        assert float(error) == pytest.approx(format.expected_error, abs=5e-5)


def test_the_numbers_of_candidates() -> None:
    assert (
        f"| int8 | {len(INT8_LARGEST)}: the largest weight gets a code from {min(INT8_LARGEST)} to {max(INT8_LARGEST)}"
        in TEXT
    )
    assert (
        f"| {len(INT8_SPANS)} spans between smallest and largest weight, {min(INT8_SPANS)} to {max(INT8_SPANS)} steps"
        in TEXT
    )
    assert f"| int4 | {2 * len(CLIPS)}: the largest weight is up to {CLIPS[-1]:.1f} times" in TEXT


# ---- bench/quality.py ----


def test_quality_scores_each_format_against_float32() -> None:
    folder = ROOT / "examples" / "tiny_llama"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = quality.beginning((folder / "heldout.txt").read_text(encoding="utf-8"), tokenizer, 120)
    assert len(tokenizer(text, add_special_tokens=False).input_ids) == 120
    found = list(quality.scores(folder, text, ["int8", "int4:row"], "float32", 64, 32))
    assert [score.name for score in found] == ["float32", "bfloat16", "int8 cache", "int8", "int4:row"]
    assert [round(score.bits, 2) for score in found] == [32, 16, 32, 8.25, 4.82]  # the head stays at 8 bits
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert found[0].perplexity == pytest.approx(
        quality.math.exp(quality.total_nats(model, tokenizer, text, 64, 32)[0] / 120), rel=1e-4
    )
    for score in found:
        assert score.change == pytest.approx(100 * (score.perplexity / found[0].perplexity - 1))
    assert 0 != abs(found[2].change) < 0.2
    assert abs(found[3].change) < abs(found[4].change)


def test_the_table_tells_what_is_missed() -> None:
    rows = [
        quality.Score("float32", 32, 10, 0),
        quality.Score("int8:64", 8.25, 10.03, 0.3),
        quality.Score("int4:64", 4.25, 10.1, 1.0),
    ]
    lines = quality.table(rows).splitlines()
    assert lines[3] == "| int8:64 | 8.25 | 10.0300 | +0.30 % | +0.2 %, missed |"
    assert lines[4].endswith("| +1.00 % | +4.0 % |")
    assert set(quality.LIMITS) - {"bfloat16", "int8 cache"} <= set(quality.FORMATS)
    assert {quality.Score(name, 0, 0, 0).family for name in quality.FORMATS} <= set(quality.FAMILIES)


def test_the_plot_is_an_svg_with_every_family(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib, of the extra `dev`")
    rows = [
        quality.Score("float32", 32, 10, 0),
        quality.Score("fp8", 8, 10.1, 1),
        quality.Score("int4:64:asymmetric", 4.4, 11, 10),
    ]
    quality.plot(rows, tmp_path / "plot.svg", "title")
    drawn = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    assert drawn.count("<svg") == 1 and all(word in drawn for word in ("float32", "fp8", "int4 asymmetric", "title"))
