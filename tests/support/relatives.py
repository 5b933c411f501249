"""Cases of which the near relatives of others run with --variants alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def less(relatives: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases, tuples or single values; those that begin with one of `relatives` are marked as variants."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*row, marks=[pytest.mark.variants] if row[0] in relatives else []) for row in rows]
