"""Candidate replacements for each place in a model, deepest first. The proof takes the first that passes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn

from infuse import ops
from infuse.plan.step import Left, Step


@dataclass(frozen=True)
class Candidate:
    """One way to replace the module at a place: steps for it or inside it, and modules left alone, with the reasons.

    `choices`: the kernel chosen for each op. `unfit`: (op, body, reason) of kernels that do not take a format.
    `places`: those inside that have further candidates of their own.
    """

    steps: tuple[Step, ...]
    left: tuple[Left, ...]
    choices: Mapping[str, ops.Choice]
    unfit: tuple[tuple[str, str, str], ...]
    places: tuple[Site, ...]

    @property
    def declined(self) -> tuple[tuple[str, str, str], ...]:
        """Op, body and reason of each kernel that cannot run."""
        choices = [choice for _, choice in sorted(self.choices.items())]
        return (*((choice.op, *declined) for choice in choices for declined in choice.declined), *self.unfit)


@dataclass(frozen=True)
class Table:
    """An embedding. It is decided at the end of the walk, because a head may share its weight."""

    path: str
    why_left: str


class Site:
    """The remaining candidates for the module at `path`, deepest first, after the one in the plan.

    Each is decided lazily. `close` releases the model and drops the candidates not decided yet.
    """

    def __init__(self, path: str, candidates: Iterator[Candidate]):
        self.path = path
        self._decided: list[Candidate] = []
        self._rest = candidates

    def __iter__(self) -> Iterator[Candidate]:
        number = 0
        while number < len(self._decided) or self._decide():
            yield self._decided[number]
            number += 1

    def _decide(self) -> bool:
        candidate = next(self._rest, None)
        if candidate is None:
            return False
        self._decided.append(candidate)
        return True

    def close(self) -> None:
        self._rest = iter(())
        for candidate in self._decided:
            for place in candidate.places:
                place.close()

    def __reduce__(self) -> tuple:
        """Decide all candidates before a copy or pickle, because the generator cannot be copied."""
        return _decided_place, (self.path, tuple(self))


def _decided_place(path: str, candidates: tuple[Candidate, ...]) -> Site:
    return Site(path, iter(candidates))


class Candidates:
    """Iterates over the candidates of `places` in `model`, in which nothing is replaced yet."""

    def __init__(self, model: nn.Module, steps: Iterable[Step], places: Iterable[Site]):
        self._model = model
        self._places = {place.path: iter(place) for place in places}
        self._taken = {self._key(step) for step in steps}

    def after(self, refused: Collection[Step]) -> Iterator[tuple[Step, Candidate]]:
        """Yield each of the `refused` steps with the next candidate of its place, without duplicate steps.

        Duplicates occur if several places hold one module, or for experts inside a layer that keeps its forward.
        """
        for step in refused:
            candidate = next(self._places.get(step.path, iter(())), None)
            if candidate is None:
                continue
            steps = [inner for inner in candidate.steps if self._key(inner) not in self._taken]
            self._taken |= {self._key(inner) for inner in steps}
            self._places = {place.path: iter(place) for place in candidate.places} | self._places
            yield step, replace(candidate, steps=tuple(steps))

    def _key(self, step: Step) -> tuple[int, str]:
        return id(self._model.get_submodule(step.path)), step.depth
