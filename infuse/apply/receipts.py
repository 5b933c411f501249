"""Receipts of proofs: what was proven on this machine is not proven again while nothing that it depends on changes.

A receipt is a small file in the cache folder, named by the identity of its proof; its content is the day of the proof.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date

from infuse.ground.cache_folder import RECEIPTS, id_of
from infuse.ground.errors import in_brief
from infuse.ground.logs import log
from infuse.plan.step import Step
from infuse.proof.identities import Identities


class Receipts:
    """Receipts of one plan's proofs. `identities` makes their identities; None where proofs are to run."""

    def __init__(self, identities: Callable[[], Identities] | None):
        self._identities: Identities | None = None
        if identities is not None:
            try:
                self._identities = identities()
            except Exception as error:  # as in `has`
                log.debug("all is proven each time: %s", in_brief(error))
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
        except Exception as error:  # attributes of the user's may raise anything; what has no identity is proven
            log.debug("%s is proven each time: %s", step.path, in_brief(error))
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
        """Name the proofs that did not run, with the day and the receipt of each, for the plan."""
        return tuple(f"{path} on {day}, receipt {id_of(self._of_steps[path])}" for path, day in self._days.items())
