"""The fast gate takes what it says, and what a test leaves behind is found and put back."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from infuse.weights import foreign
from tests.models.families import _EVERY, BY_NAME, COVERING, MAMBA
from tests.support.gate import SHARE, left_by_the_gate, seconds_of_cases
from tests.support.leftovers import found_and_put_back

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, eq=False)
class Item:
    """What the gate reads of a case."""

    nodeid: str
    marks: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)

    @property
    def callspec(self) -> Item:
        return self

    def get_closest_marker(self, name: str) -> Any:
        return self.marks.get(name)


def cases(test: str, names: Any, **marks: Any) -> list[Any]:
    return [Item(f"tests/test_file.py::{test}[{name}]", marks, {"name": name}) for name in names]


def kept(items: list[Any], **seconds: float) -> list[Any]:
    left_out = left_by_the_gate(items, {f"tests/test_file.py::{test}": mean for test, mean in seconds.items()})
    return [item.params["name"] for item in items if item not in left_out]


def test_the_covering_families_are_in_the_table() -> None:
    assert {family.name for family in (*_EVERY, *MAMBA)} >= COVERING


def test_of_many_families_the_covering_ones_and_some_of_the_others_stay() -> None:
    found = kept(cases("test_all", BY_NAME))
    assert {*found} >= COVERING & BY_NAME.keys() and len(COVERING) < len(found) < len(BY_NAME) / 2
    assert found == kept(cases("test_others_of_the_file", BY_NAME))
    assert kept(cases("test_few", ["phi-qk", "mpt"])) == ["phi-qk", "mpt"]


def test_slow_tests_go_and_costly_ones_give_some_cases() -> None:
    assert kept(cases("test_slow", range(3), slow=pytest.mark.slow.mark)) == []
    assert len(kept(cases("test_grid", range(1000)), test_grid=0.1)) == SHARE * 100
    assert len(kept(cases("test_grid", range(100)), test_grid=100.0)) == 1
    assert len(kept(cases("test_grid", range(100)), test_other=1.0)) == 100


def test_of_costly_tests_families_that_cover_the_parts_stay() -> None:
    found = kept(cases("test_all", BY_NAME), test_all=0.1)
    assert 2 < len(found) < len(COVERING) and {*found} <= COVERING


def test_each_test_keeps_a_case() -> None:
    assert kept(cases("test_others", [name for name in BY_NAME if name not in COVERING]))


def test_each_recorded_test_is_there() -> None:
    """`pytest --full --seconds` records them anew."""
    for test in seconds_of_cases():
        path, _, name = test.partition("::")
        assert f"def {name.rpartition('::')[2]}(" in (ROOT / path).read_text(encoding="utf-8"), f"{test} is no more"


def test_what_is_left_changed_is_found_and_put_back() -> None:
    with found_and_put_back() as changes:
        os.environ["INFUSE_OF_A_TEST"] = "1"
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        foreign.register(lambda unread: foreign.Recognised({}, set(), {}))
    assert "INFUSE_OF_A_TEST" not in os.environ and torch.is_grad_enabled() and not foreign._registered
    assert torch.get_default_dtype() == torch.float32 and torch.empty(0).device.type == "cpu"
    starts = ("the grad mode", "the default dtype", "the default device", "the registered layouts", "the environment")
    assert len(changes) == 5 and all(map(str.startswith, changes, starts))


def test_nothing_is_found_where_nothing_is_left() -> None:
    with found_and_put_back() as changes:
        torch.zeros(1)
    assert changes == []
