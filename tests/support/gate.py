"""Which tests a run takes: the gate of `make test`, the rest of them, or all.

The gate leaves out what is slow, most cases of tests marked `sampled`, and of tests over many families all but those
that cover the parts. It takes the same cases every time.
"""

from __future__ import annotations

import sys
import zlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

FEW = 10  # a test over no more families than these has chosen them for what they are: all of them run
EVERY = 8  # of the families that cover nothing new, each test file takes one in so many
TABLES = ("tests.models.families", "tests.models.encoder_decoders")


def taken(items: Sequence[pytest.Item], config: pytest.Config) -> list[pytest.Item]:
    """The items that this run takes, by its options. Tests that are named on the command line run in any case."""
    if not config.getoption("--variants"):
        items = [item for item in items if item.get_closest_marker("variants") is None]
    if config.getoption("--full") or any("::" in argument for argument in config.args):
        return list(items)
    left_out = left_by_the_gate(items)
    return [item for item in items if (item in left_out) == config.getoption("--rest")]


def left_by_the_gate(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    left_out = {item for item in items if item.get_closest_marker("slow") or not _is_sampled(item)}
    known = _names_of_families()
    by_test: dict[str, dict[pytest.Item, str]] = defaultdict(dict)
    for item in items:
        if name := _family(item, known):
            by_test[item.nodeid.partition("[")[0]][item] = name
    for test, families in by_test.items():
        if len(set(families.values())) > FEW:
            file = test.partition("::")[0]  # of a family, all tests of a file or none: they share its models
            left_out |= {item for item, name in families.items() if not (known[name] or _is_one_in(EVERY, file, name))}
    return left_out


def _is_sampled(item: pytest.Item) -> bool:
    """Whether it is among the cases that the gate takes of a test marked `sampled(every)`, or of one that is not."""
    sampled = item.get_closest_marker("sampled")
    return sampled is None or _is_one_in(sampled.args[0], item.nodeid)


def _is_one_in(every: int, *names: str) -> bool:
    return zlib.crc32("::".join(names).encode()) % every == 0


def _names_of_families() -> dict[str, bool]:
    """The names of all families, and whether the family is one of those that cover the parts.

    Importing the tables takes seconds; if no test file has imported them, no test is over families.
    """
    tables = [sys.modules[name] for name in TABLES if name in sys.modules]
    return {name: name in table.COVERING for table in tables for name in table.BY_NAME}


def _family(item: pytest.Item, known: dict[str, bool]) -> str | None:
    """The family that a case is of: a parameter is its name or the family itself."""
    parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    names = (getattr(value, "name", value) for value in parameters.values())
    return next((name for name in names if isinstance(name, str) and name in known), None)
