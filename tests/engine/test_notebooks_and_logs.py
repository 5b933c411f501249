"""How a plan and a report show in notebooks, where progress shows, and what the logger "infuse" is told."""

from __future__ import annotations

import logging
import os
import pickle
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from rich.console import Console

import infuse
from tests.models.families import BY_NAME
from tests.support.forked import Program


class Tags(HTMLParser):
    """The cells of each table row; every tag must be closed in order."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag != "br":
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_a_plan_is_a_table_in_a_notebook() -> None:
    plan = infuse.plan(BY_NAME["llama"].make(), dtype=torch.float32, quant="int8:16")
    rows = Tags(plan._repr_html_()).rows
    assert {len(row) for row in rows} == {4}
    assert ["block", "model.layers.{0-2}"] in [row[:2] for row in rows]
    assert [row[0] for row in rows[1:3]] == ["replaced", "memory"]
    for row in rows[1:]:
        assert all(cell in str(plan) for cell in row)  # the same words as the text
    assert "&lt;b&gt;" in pickle.loads(pickle.dumps(type(plan)(**{**vars(plan), "notes": ("<b>",)})))._repr_html_()


def test_a_report_is_a_text_with_a_table() -> None:
    engine = infuse.init_inference(BY_NAME["llama"].make(), dtype=torch.float32)
    report = engine.report()
    assert isinstance(report, str) and report.startswith(str(engine.plan)) and "blocks and" in report
    html = report._repr_html_()
    assert Tags(html).rows == Tags(engine.plan._repr_html_()).rows and "blocks and" in html


def test_the_plan_explains_its_own_words_alone() -> None:
    text = str(infuse.plan(BY_NAME["llama"].make(), dtype=torch.float32))
    words = next(line for line in text.splitlines() if line.startswith("  words  "))
    assert "block: " in words and "left: " in words and "attention: " not in words and "split: " not in words


@pytest.mark.parametrize("notebook", [True, False])
def test_bars_show_in_notebooks(
    notebook: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Console, "is_jupyter", notebook, raising=False)
    monkeypatch.setattr(Console, "__init__", lambda self, **_: None)
    monkeypatch.setattr(Console, "is_terminal", False, raising=False)
    infuse.init_inference(BY_NAME["llama"].make(), dtype=torch.float32)
    assert ("proving" in capfd.readouterr().err) == notebook


def test_the_logger_hears_the_plan_the_stages_and_warnings(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="infuse"), pytest.warns(UserWarning, match="replace_method"):
        engine = infuse.init_inference(BY_NAME["llama"].make(), dtype=torch.float32, replace_method="auto")
    by_level = {level: [r.getMessage() for r in caplog.records if r.levelno == level] for level in (10, 20, 30)}
    assert any("replacements done" in text for text in by_level[logging.INFO])
    assert str(engine.plan) in by_level[logging.DEBUG]
    assert any(text.startswith("proving: ") for text in by_level[logging.DEBUG])
    assert [text for text in by_level[logging.WARNING] if "replace_method" in text]
    assert {record.name for record in caplog.records} == {"infuse"}


@pytest.mark.slow
def test_without_logging_a_warning_shows_once(tmp_path: Path) -> None:
    program = (
        "import infuse, torch\n"
        "infuse.init_inference(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(2, 2)), "
        "replace_method='auto', dtype=torch.float64)\n"
    )
    done = Program("-c", program, folder=tmp_path, environment=os.environ)
    _, errors = done.communicate(timeout=300)
    assert done.returncode == 0 and errors.count("NOTHING IS ACCELERATED") == 1, errors
