"""docs/models.md has what its script finds; and the script outlives models that crash or hang."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from infuse.native import kernels
from tests.models.every_architecture import model_types
from tests.models.models_page import MEANINGS, NOT_MADE, Record, record_of, records, row, versions

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
MADE, AWAY = PAGE.split("## Not made small")
# Of each kind: decoders, encoders, both, mixtures, recurrent states, pictures, sound.
SAMPLE = (
    *("afmoe", "albert", "apertus", "bart", "bert", "big_bird", "clip", "deberta-v2", "deepseek_v3", "falcon"),
    *("falcon_mamba", "gemma2", "gpt2", "gpt_oss", "jetmoe", "llama", "llava", "mobilenet_v2", "modernbert", "olmo3"),
    *("paligemma", "qwen3_next", "rwkv", "speech_to_text", "t5", "vit", "whisper"),
)

of_these_versions = pytest.mark.skipif(
    versions() not in PAGE, reason=f"the page is of other versions than {versions()}"
)


@pytest.mark.slow
@of_these_versions
@pytest.mark.skipif(isinstance(kernels(), str), reason="without kernels, linears stay PyTorch's")
@pytest.mark.parametrize("kind", SAMPLE)
def test_the_row_is_what_the_model_gets(kind: str) -> None:
    assert row(kind, record_of(kind)) in PAGE.splitlines()


@of_these_versions
def test_every_type_has_a_row() -> None:
    tables = [re.findall(r"^\| `([\w.-]+)` \|", text, re.MULTILINE) for text in (MADE, AWAY)]
    assert sorted(sum(tables, [])) == sorted(model_types())
    assert all(kinds == sorted(kinds) for kinds in tables) and set(SAMPLE) <= set(tables[0])


def test_the_shares_are_those_of_the_rows() -> None:
    shares = dict(re.findall(r"^\| (\w+) \| (\d+) \| \d+ % \|", MADE, re.MULTILINE))
    rows = Counter(re.findall(r"^\| `[\w.-]+` \| (\w+)", MADE, re.MULTILINE))
    assert {gets: int(count) for gets, count in shares.items()} == rows and rows.keys() <= MEANINGS.keys()


def test_reasons_do_not_break_the_table() -> None:
    found = row("x", Record("partly", "spec", "2 of 4", "a `name` | __init__ of a_b"))
    assert found == r"| `x` | partly: 2 of 4 layers | spec | a \`name\` \| \_\_init\_\_ of a_b |"
    assert row("x", Record("whole", "spec", "2 of 2")) == "| `x` | whole | spec | |"
    assert row("x", Record(NOT_MADE, why="a *b*")) == r"| `x` | a \*b\* |"


@pytest.mark.slow
def test_a_type_that_crashes_or_hangs_is_a_record() -> None:
    found = records(["fine", "crashes", "also fine"], processes=2, target=_fails)
    assert list(found) == ["also fine", "crashes", "fine"]
    assert found["fine"] == found["also fine"] == Record("whole")
    assert found["crashes"] == Record(NOT_MADE, why="its process ends with -6")
    assert records(["hangs"], seconds=1, target=_fails) == {"hangs": Record(NOT_MADE, why="takes more than 1 s")}


def _fails(connection: Connection, kind: str) -> None:
    if kind == "crashes":
        os.abort()
    if kind == "hangs":
        time.sleep(1000)
    connection.send(Record("whole"))
