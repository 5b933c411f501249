"""The fast gate takes what it says, and what a test leaves behind is found and put back."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from infuse.weights import foreign
from tests.models.families import _EVERY, BY_NAME, COVERING, MAMBA
from tests.support.gate import left_by_the_gate
from tests.support.leftovers import found_and_put_back


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


def kept(items: list[Any]) -> list[str]:
    left_out = left_by_the_gate(items)
    return [item.params["name"] for item in items if item not in left_out]


def test_the_covering_families_are_in_the_table() -> None:
    assert {family.name for family in (*_EVERY, *MAMBA)} >= COVERING


def test_of_many_families_the_covering_ones_and_some_of_the_others_stay() -> None:
    found = kept(cases("test_all", BY_NAME))
    assert {*found} >= COVERING & BY_NAME.keys() and len(COVERING) < len(found) < len(BY_NAME) / 2
    assert found == kept(cases("test_others_of_the_file", BY_NAME))
    assert kept(cases("test_few", ["phi-qk", "mpt"])) == ["phi-qk", "mpt"]


def test_slow_tests_go_and_some_of_the_sampled_cases_stay() -> None:
    assert kept(cases("test_slow", range(3), slow=pytest.mark.slow.mark)) == []
    assert 10 < len(kept(cases("test_grid", range(100), sampled=pytest.mark.sampled(5).mark))) < 30


def test_each_test_keeps_a_case() -> None:
    assert kept(cases("test_grid", range(2), sampled=pytest.mark.sampled(10**6).mark)) == [0]
    assert kept(cases("test_others", [name for name in BY_NAME if name not in COVERING]))


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
