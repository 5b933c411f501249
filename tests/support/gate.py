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
EVERY = 16  # of the families that cover nothing new, each test file takes one in so many
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
    """What the gate leaves out: of each test that is not slow, it takes one case at least."""
    known = _names_of_families()
    by_test: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        by_test[item.nodeid.partition("[")[0]].append(item)
    left_out: set[pytest.Item] = set()
    for cases in by_test.values():
        quick = [item for item in cases if item.get_closest_marker("slow") is None]
        kept = [item for item in _of_covering_families(quick, known) if _is_sampled(item)] or quick[:1]
        left_out |= {*cases} - {*kept}
    return left_out


def _of_covering_families(cases: list[pytest.Item], known: dict[str, bool]) -> list[pytest.Item]:
    """The cases of one test without those of families that others stand for."""
    families = {item: _family(item, known) for item in cases}
    if len({*families.values()} - {None}) <= FEW:
        return cases
    return [item for item, name in families.items() if name is None or known[name] or _is_drawn(item, name)]


def _is_drawn(item: pytest.Item, family: str) -> bool:
    """Whether the item's file takes the family: all its tests do, or none, since they share the family's models."""
    return _is_one_in(EVERY, item.nodeid.partition("::")[0], family)


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
