"""Receipts of proofs: what was proven on this machine is not proven again while nothing that it depends on changes.

A receipt is a small file in the cache folder, named by the identity of its proof. INFUSE_RECEIPTS=0 neither reads nor
writes any; verify="all" and "strict" prove anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from infuse.cache_folder import is_trusted, roots
from infuse.logs import log
from infuse.plan.step import Step
from infuse.proof.identity import Identities, Unknown

FOLDER = "receipts"
MOST = 2048  # files; the oldest go first
_ID_LENGTH = 12


@dataclass(frozen=True)
class Receipt:
    """The proof with this `identity` succeeded on a day, YYYY-MM-DD."""

    identity: str
    proven: str

    @property
    def id(self) -> str:
        return self.identity[:_ID_LENGTH]

    def text(self) -> str:
        """The content of the file. The last field tells whether it is whole."""
        fields = {"identity": self.identity, "proven": self.proven}
        return json.dumps({**fields, "sum": hashlib.sha256(json.dumps(fields).encode()).hexdigest()}) + "\n"


class Receipts:
    """Receipts of one plan's proofs. `identities` is None where proofs are to run."""

    def __init__(self, identities: Identities | None):
        self._identities = identities
        self._of_steps: dict[str, str] = {}  # path of a step without a receipt → its identity
        self.found: dict[str, Receipt] = {}  # by path

    @property
    def are_kept(self) -> bool:
        return self._identities is not None

    def has(self, step: Step) -> bool:
        """Whether a step was proven before. Where the proof picks one of several interpretations, it runs again."""
        if self._identities is None or step.others or step.keeps_forward:
            return False
        try:
            identity = self._identities.of(step)
        except (Unknown, RecursionError) as unknown:
            log.debug("%s is proven each time: nothing identifies %s", step.path, unknown)
            return False
        receipt = read(identity)
        if receipt is None:
            self._of_steps[step.path] = identity
            return False
        self.found[step.path] = receipt
        return True

    def forget(self, step: Step) -> None:
        """Prove a step after all."""
        if receipt := self.found.pop(step.path, None):
            self._of_steps[step.path] = receipt.identity

    def keep(self, step: Step) -> None:
        """Write the receipt of a step that was just proven."""
        if identity := self._of_steps.get(step.path):
            write(Receipt(identity, date.today().isoformat()))

    def texts(self) -> tuple[str, ...]:
        """What the plan says of proofs that did not run."""
        return tuple(f"{path} on {one.proven}, receipt {one.id}" for path, one in self.found.items())


def are_used() -> bool:
    return os.environ.get("INFUSE_RECEIPTS") != "0"


def read(identity: str) -> Receipt | None:
    """The receipt of a proof; None if there is none, or none that is whole."""
    for folder in _folders():
        try:
            text = (folder / f"{identity[:_ID_LENGTH]}.json").read_text(encoding="utf-8")
            found = json.loads(text)
            receipt = Receipt(found["identity"], found["proven"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if receipt.identity == identity and receipt.text() == text:
            return receipt
    return None


def write(receipt: Receipt) -> None:
    """Write a receipt to the first folder that takes it. One that cannot be written only costs another proof."""
    for root in roots():
        folder = root / FOLDER
        with suppress(OSError):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not is_trusted(root):
                continue
            folder.mkdir(exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False, encoding="utf-8") as file:
                file.write(receipt.text())
            os.replace(file.name, folder / f"{receipt.id}.json")
            _keep_newest(folder)
            return


def count() -> int:
    return sum(1 for _ in _files())


def clear() -> int:
    """Remove all receipts; return how many."""
    files = list(_files())
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)


def _keep_newest(folder: Path) -> None:
    files = list(folder.glob("*.json"))
    if len(files) > MOST:
        files.sort(key=lambda file: file.stat().st_mtime)
        for file in files[: len(files) - MOST]:
            file.unlink(missing_ok=True)


def _files() -> Iterator[Path]:
    for folder in _folders():
        yield from folder.glob("*.json")


def _folders() -> list[Path]:
    return [root / FOLDER for root in roots() if is_trusted(root)]
