"""The module that calls each linear, and what it was given: found by one run of the model on random inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from infuse.architectures.model_inputs import StopModel, random_inputs, watched
from infuse.errors import CheckpointError
from infuse.plan.found import model_around
from infuse.proof.shortened import shortened


@dataclass(frozen=True)
class Caller:
    """The innermost module in whose forward a linear was called, the linear's path in it, and the arguments of that
    forward.

    Of a linear that is not called it is the innermost module around it that is: that one may read the weight itself.
    `short`: it was recorded in a model that had been `shortened`.
    """

    module: nn.Module
    path: str
    args: tuple
    kwargs: dict[str, Any]
    short: bool


@dataclass
class _Recorder:
    """Hooks on the linears and on the modules around them: which of these run, with which arguments, when a linear is
    called.
    """

    model: nn.Module
    linears: Mapping[str, nn.Module]
    short: bool
    found: dict[str, Caller] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)
    given: dict[str, tuple[tuple, dict[str, Any]]] = field(default_factory=dict)  # of the last call of each

    def run(self) -> None:
        """Run the model on random inputs until all linears have been called."""
        around = {parent: self.model.get_submodule(parent) for path in self.linears for parent in _around(path)}
        with watched(around, self._enter, self._leave), watched(self.linears, self._called, self._returned):
            self.model(**random_inputs(self.model))

    def note_caller(self, path: str, among: Iterable[str]) -> None:
        """Note the innermost of the modules around the linear that are `among` those given."""
        innermost = next((parent for parent in _around(path) if parent in among), None)
        if innermost is not None and path not in self.found:
            inside = path.removeprefix(f"{innermost}.") if innermost else path
            self.found[path] = Caller(self.model.get_submodule(innermost), inside, *self.given[innermost], self.short)

    def _enter(self, path: str, args: tuple, kwargs: dict[str, Any]) -> None:
        self.running.append(path)
        self.given[path] = copy.deepcopy((args, kwargs))  # as they are now: caches fill, and some are written to

    def _leave(self, path: str, args: tuple, output: Any) -> None:
        self.running.pop()

    def _called(self, path: str, args: tuple, kwargs: dict[str, Any]) -> None:
        self.note_caller(path, self.running)

    def _returned(self, path: str, args: tuple, output: Any) -> None:
        if len(self.found) == len(self.linears):
            raise StopModel


def _around(path: str) -> Iterator[str]:
    """The paths of the modules around the one at `path`, from the innermost on."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def find_callers(
    model: nn.Module, paths: Iterable[str], running: Callable[[], AbstractContextManager[None]]
) -> tuple[dict[str, Caller], dict[str, str]]:
    """Who calls each linear when `model` runs on random inputs, or the nearest model around the linear does; of the
    others, why not.

    `running` gives a context in which the model can run.
    """
    found: dict[str, Caller] = {}
    reasons = dict.fromkeys(paths, "the model does not call it")
    for owner in dict.fromkeys(["", *(model_around(model, path) for path in reasons)]):
        prefix = f"{owner}." if owner else ""
        waiting = [path for path in reasons if path.startswith(prefix)]
        if not waiting:
            continue
        try:
            with running():
                linears = {path.removeprefix(prefix): model.get_submodule(path) for path in waiting}
                calls = _callers(model.get_submodule(owner), linears)
        except CheckpointError:
            raise
        except Exception as error:  # whatever the user's model does: the proof of the linear alone stands
            reasons |= dict.fromkeys(waiting, f"{type(error).__name__}: {error}".partition("\n")[0])
        else:
            found |= {f"{prefix}{path}": caller for path, caller in calls.items()}
            reasons = {path: reason for path, reason in reasons.items() if path not in found}
    return found, reasons


def proven_alone(reasons: Mapping[str, str]) -> list[str]:
    """Notes for the plan: the linears of which no caller is known."""
    by_reason: dict[str, list[str]] = {}
    for path, reason in reasons.items():
        by_reason.setdefault(reason, []).append(path)
    return [
        f"proven alone, not inside the module that calls it: {', '.join(paths)} ({reason})"
        for reason, paths in by_reason.items()
    ]


def _callers(model: nn.Module, linears: Mapping[str, nn.Module]) -> dict[str, Caller]:
    """Of the linears that are called when `model` runs, by their paths in it."""
    try:
        with shortened(model, linears.values()):
            return _recorded(model, linears, short=True)
    except Exception:  # its layers are no chain of hidden states
        return _recorded(model, linears, short=False)


def _recorded(model: nn.Module, linears: Mapping[str, nn.Module], short: bool) -> dict[str, Caller]:
    recorder = _Recorder(model, linears, short)
    recorder.run()
    for path in linears:
        recorder.note_caller(path, recorder.given)
    return recorder.found
