"""A hook of mkdocs: files from outside of docs/ become pages of the site, and links between all of them hold there.

Links are written for GitHub, relative to the file that they are in. Pages of docs/ lie at the root of the site, and
other files at their paths in the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "bench/results/*")
RESULTS = "Measurements"  # the entry of `nav` that gets a page for each file of results, the latest first


def outside() -> list[str]:
    """Paths in the repository."""
    return [path.relative_to(ROOT).as_posix() for pattern in OUTSIDE for path in sorted(ROOT.glob(pattern))]


def on_config(config: Any) -> Any:
    results = [path for path in reversed(outside()) if re.match(r"bench/results/.*\.md$", path)]
    (entry,) = (entry for entry in config.nav if RESULTS in entry)
    entry[RESULTS] = [{re.sub(r"^(\d+-\d+-\d+)-", r"\1 ", Path(path).stem): path} for path in results]
    return config


def on_files(files: Any, config: Any) -> Any:
    for path in outside():
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    here = page.file.src_uri
    folder = posixpath.dirname(here if here in outside() else f"docs/{here}")

    def as_in_site(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1])).removeprefix("docs/")
        return f"]({posixpath.relpath(target, posixpath.dirname(here) or '.')}"

    linked = re.sub(r"\]\(((?![a-z]+:)[^)#\s]+)", as_in_site, markdown)
    # A pipe in code in a table is escaped for GitHub; Python-Markdown would show the backslash.
    return re.sub(r"^\|.*", lambda row: re.sub(r"`[^`]*`", _with_pipes, row[0]), linked, flags=re.MULTILINE)


def _with_pipes(code: re.Match[str]) -> str:
    return code[0].replace("\\|", "|")
