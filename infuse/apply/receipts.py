"""Receipts of proofs: what was proven on this machine is not proven again while nothing that it depends on changes.

A receipt is a small file in the cache folder, named by the identity of its proof; its content is the day of the proof.
"""

from __future__ import annotations

from datetime import date

from infuse.cache_folder import RECEIPTS, id_of
from infuse.identity import Unknown
from infuse.logs import log
from infuse.plan.step import Step
from infuse.proof.identities import Identities


class Receipts:
    """Receipts of one plan's proofs. `identities` is None where proofs are to run."""

    def __init__(self, identities: Identities | None):
        self._identities = identities
        self._of_steps: dict[str, str] = {}  # path → identity
        self._days: dict[str, str] = {}  # path of a step that was proven before → YYYY-MM-DD

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
        self._of_steps[step.path] = identity
        day = RECEIPTS.read(identity)
        if day is not None:
            self._days[step.path] = day.decode()
        return day is not None

    def forget(self, step: Step) -> None:
        """Prove a step after all."""
        self._days.pop(step.path, None)

    def keep(self, step: Step) -> None:
        """Write the receipt of a step that was just proven."""
        if identity := self._of_steps.get(step.path):
            RECEIPTS.write(identity, date.today().isoformat().encode())

    def texts(self) -> tuple[str, ...]:
        """What the plan says of proofs that did not run."""
        return tuple(f"{path} on {day}, receipt {id_of(self._of_steps[path])}" for path, day in self._days.items())
