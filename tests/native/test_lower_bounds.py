"""The lower bounds of pyproject.toml: infuse works with the oldest version of each package that is no PyTorch."""

from __future__ import annotations

import re

import pytest

from tests.support.oldest import PYTHON_PACKAGES, ROOT, installed, lower_bounds, requirement, run_with


def test_every_dependency_has_a_lower_bound() -> None:
    """What has none is not tried with an old version. isal has a stand-in, zlib, wherever it cannot be imported."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = text.partition("\ndependencies = [")[2].partition("\n]")[0]
    assert set(re.findall(r'^ *"([\w-]+)', listed, re.MULTILINE)) == {"torch", "isal", *PYTHON_PACKAGES}
    assert lower_bounds().keys() >= {"torch", "triton", *PYTHON_PACKAGES}


@pytest.mark.slow
def test_the_oldest_versions_work(request: pytest.FixtureRequest) -> None:
    """All at once, with what they need; PyTorch is this environment's: of its oldest there is no small build."""
    folder = installed(request.config, *map(requirement, PYTHON_PACKAGES), dependencies=True)
    said = run_with(folder, "-m", "pytest", "--full", "-x", "-p", "no:cacheprovider", "tests/native/oldest_cases.py")
    assert " passed" in said and "skipped" not in said, said
