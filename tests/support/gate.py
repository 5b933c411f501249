"""Which tests a run takes: the gate of `make test`, the rest of them, or all.

The gate leaves out what is slow, of tests over many families those that others stand for, and of costly tests most
cases. It takes the same cases every time.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

# What the gate takes as a whole, except for slow tests and for families that others stand for.
WHOLE = (
    "tests/test_house.py",
    "tests/reading/test_changed_layers.py",
    "tests/parts/",
    "tests/weights/checkpoints/test_hostile_files.py",
    "tests/weights/coded/test_untrusted_files.py",
    "tests/ops/test_ops.py::test_body_is_the_reference",
    "tests/models/test_families.py::test_every_layer_is_a_block",
    "tests/models/test_families.py::test_prefill",
    "tests/models/test_families.py::test_decode",
)
FEW = 10  # a test over no more families than these has chosen them for what they are
EVERY = 16  # of the families that cover nothing new, each test file takes one in so many
TABLES = ("tests.models.families", "tests.models.encoder_decoders")
# Of a test whose cases together take S seconds, the gate takes cases of SHARE * sqrt(S): what takes longest gives most.
# With this share, all of it takes about 12 minutes of processor time.
SHARE = 0.15
SECONDS = Path(__file__).with_name("seconds.txt")


def taken(items: Sequence[pytest.Item], config: pytest.Config) -> list[pytest.Item]:
    """The items that this run takes, by its options. Tests that are named on the command line run in any case."""
    if not config.getoption("--variants"):
        items = [item for item in items if item.get_closest_marker("variants") is None]
    if config.getoption("--full") or any("::" in argument for argument in config.args):
        return list(items)
    left_out = left_by_the_gate(items, seconds_of_cases())
    return [item for item in items if (item in left_out) == config.getoption("--rest")]


def seconds_of_cases() -> dict[str, float]:
    """The mean processor time of a case, by test. Each line of the file has both; `--seconds` writes it."""
    lines = (line.split() for line in SECONDS.read_text(encoding="utf-8").splitlines())
    return {test: float(seconds) for seconds, test in lines}


def left_by_the_gate(items: Sequence[pytest.Item], seconds: Mapping[str, float]) -> set[pytest.Item]:
    """What the gate leaves out: of each test that is not slow, it takes one case at least.

    A test that `seconds` does not have is cheap or new: it gives all its cases.
    """
    covers = _families()
    by_test: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        by_test[item.nodeid.partition("[")[0]].append(item)
    left_out: set[pytest.Item] = set()
    for test, cases in by_test.items():
        quick = [item for item in cases if item.get_closest_marker("slow") is None]
        kept = _without_families_that_others_cover(quick, covers) or quick[:1]
        if not test.startswith(WHOLE):
            kept = sorted(kept, key=lambda item: _rank(item, covers))[: _number(len(kept), seconds.get(test, 0.0))]
        left_out |= {*cases} - {*kept}
    return left_out


def _number(cases: int, seconds: float) -> int:
    """How many of a test's cases the gate takes, if each takes so long."""
    return max(1, round(SHARE * math.sqrt(cases * seconds) / seconds)) if seconds else cases


def _without_families_that_others_cover(cases: list[pytest.Item], covers: Mapping[str, bool]) -> list[pytest.Item]:
    """Of a family, all tests of a file stay or none, since they share the family's models."""
    families = {item: _family(item, covers) for item in cases}
    if len({*families.values()} - {None}) <= FEW:
        return cases
    return [
        item for item, name in families.items() if name is None or covers[name] or _hash(_file(item), name) % EVERY == 0
    ]


def _rank(item: pytest.Item, covers: Mapping[str, bool]) -> tuple[bool, int, int]:
    """The order in which the gate takes cases: first those of families that cover the parts."""
    family = _family(item, covers)
    own = _hash(item.nodeid)
    return (family is None or not covers[family], own if family is None else _hash(_file(item), family), own)


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _hash(*names: str) -> int:
    return zlib.crc32("::".join(names).encode())  # Python's own differs from process to process


def _families() -> dict[str, bool]:
    """The names of all families, and whether the family is one of those that cover the parts.

    Importing the tables takes seconds; if no test file has imported them, no test is over families.
    """
    tables = [sys.modules[name] for name in TABLES if name in sys.modules]
    return {name: name in table.COVERING for table in tables for name in table.BY_NAME}


def _family(item: pytest.Item, covers: Mapping[str, bool]) -> str | None:
    """The family that a case is of: a parameter is its name or the family itself."""
    parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    names = (getattr(value, "name", value) for value in parameters.values())
    return next((name for name in names if isinstance(name, str) and name in covers), None)


class Recorder:
    """Writes the mean time of a case of each costly test to the file that `seconds_of_cases` reads."""

    def __init__(self) -> None:
        self.times: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed:  # what is skipped here may take long elsewhere
            self.times[report.nodeid.partition("[")[0]][report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        costly = {
            test: sum(cases.values()) / len(cases)
            for test, cases in self.times.items()
            if len(cases) > 1 and sum(cases.values()) > SHARE**2
        }
        cheap = self.times.keys() - costly.keys()
        known = {test: mean for test, mean in seconds_of_cases().items() if test not in cheap}
        lines = (f"{mean:.3f} {test}\n" for test, mean in sorted((known | costly).items()))
        SECONDS.write_text("".join(lines), encoding="utf-8")
