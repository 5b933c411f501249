"""Third-party clients of a replaced model: what they get must equal what they get of the original."""

from __future__ import annotations

import logging

import pytest
from torch._dynamo.utils import counters


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep torch's trace from pytest, which would store its thousands of lines."""
    counters.clear()
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
