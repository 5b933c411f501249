"""The pages as a whole: links lead somewhere, the site has each page, and counts and names are those of the code."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import infuse

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), *(ROOT / "bench" / "results").glob("*.md")])


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", text_of(page), flags=re.M | re.S)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_site_has_each_page() -> None:
    """The changelog, contributing and results are added by the hook of mkdocs.yml."""
    settings = re.sub(r"!!python/\S+", "", text_of(ROOT / "mkdocs.yml"))
    listed = re.findall(r"[\w.-]+\.md", str(yaml.safe_load(settings)["nav"]))
    assert sorted(listed) == sorted([*(page.name for page in DOCS.glob("*.md")), "CHANGELOG.md", "CONTRIBUTING.md"])


def test_the_reference_has_each_public_name() -> None:
    """`infuse.plan` stands there as `infuse.engine.plan`: by its short name, the package would be found."""
    named = re.findall(r"^::: infuse\.(?:engine\.)?(\w+)$", text_of(DOCS / "api.md"), re.MULTILINE)
    assert set(infuse.__all__) <= set(named) and len(named) == len(set(named))


def test_counts_of_families_are_those_of_their_names() -> None:
    lineages = text_of(ROOT / "tests" / "models" / "lineages.md")
    assert lineages in text_of(DOCS / "models.md")
    rows = dict(re.findall(r"^\| ([\w -]+) \| (.+) \|$", lineages, re.MULTILINE))
    assert rows.pop("lineage") == "as whole blocks"
    names = {lineage: re.sub(r" \([^)]*\)", "", named).split(", ") for lineage, named in rows.items()}
    counts = dict(re.findall(r"^\| ([\w -]+) \| (\d+)[^|]* \|", text_of(ROOT / "README.md"), re.MULTILINE))
    assert {lineage: int(count) for lineage, count in counts.items()} == {each: len(names[each]) for each in names}


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_example_runs(page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    (example, *_) = re.findall(r"^```python\n(.+?)^```", text_of(ROOT / page), re.MULTILINE | re.DOTALL)
    exec(compile(example, page, "exec"), {})
    assert "def read_file(path):" in capsys.readouterr().out


@pytest.mark.slow
def test_the_site_is_built(tmp_path: Path) -> None:
    """`make docs` installs what it needs into an environment of its own; this one rarely has it."""
    if not (find_spec("mkdocs") and find_spec("material") and find_spec("mkdocstrings")):
        pytest.skip("without the packages of the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "init_inference" in (tmp_path / "api.html").read_text(encoding="utf-8")
