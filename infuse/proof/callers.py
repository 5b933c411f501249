"""Find the module that calls each linear, and its arguments, in one run of the model on random inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from infuse.architectures.model_inputs import StopModel, random_inputs, watched
from infuse.errors import CheckpointError, in_brief
from infuse.plan.found import model_around
from infuse.proof.shortened import shortened


@dataclass(frozen=True)
class Caller:
    """The innermost module whose forward called a linear, the linear's path in it, and the arguments of that forward.

    For a linear that is never called, this is the innermost enclosing module that is; it may read the weight directly.
    `short`: it was recorded in a `shortened` model.
    """

    module: nn.Module
    path: str
    args: tuple
    kwargs: dict[str, Any]
    short: bool


@dataclass
class _Recorder:
    """Hooks on the linears and their enclosing modules that record which modules run, and with which arguments."""

    model: nn.Module
    linears: Mapping[str, nn.Module]
    short: bool
    found: dict[str, Caller] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)
    given: dict[str, tuple[tuple, dict[str, Any]]] = field(default_factory=dict)  # arguments of each module's last call

    def run(self) -> None:
        """Run the model on random inputs until all linears have been called."""
        around = {parent: self.model.get_submodule(parent) for path in self.linears for parent in _around(path)}
        with watched(around, self._enter, self._leave), watched(self.linears, self._called, self._returned):
            self.model(**random_inputs(self.model))

    def note_caller(self, path: str, among: Iterable[str]) -> None:
        """Record the innermost enclosing module of the linear that is in `among`."""
        innermost = next((parent for parent in _around(path) if parent in among), None)
        if innermost is not None and path not in self.found:
            inside = path.removeprefix(f"{innermost}.") if innermost else path
            self.found[path] = Caller(self.model.get_submodule(innermost), inside, *self.given[innermost], self.short)

    def _enter(self, path: str, args: tuple, kwargs: dict[str, Any]) -> None:
        self.running.append(path)
        self.given[path] = copy.deepcopy((args, kwargs))  # copied because caches and some arguments are modified later

    def _leave(self, path: str, args: tuple, output: Any) -> None:
        self.running.pop()

    def _called(self, path: str, args: tuple, kwargs: dict[str, Any]) -> None:
        self.note_caller(path, self.running)

    def _returned(self, path: str, args: tuple, output: Any) -> None:
        if len(self.found) == len(self.linears):
            raise StopModel


def _around(path: str) -> Iterator[str]:
    """Yield the paths of the modules that contain the one at `path`, innermost first."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def find_callers(
    model: nn.Module, paths: Iterable[str], running: Callable[[], AbstractContextManager[None]]
) -> tuple[dict[str, Caller], dict[str, str]]:
    """Find the caller of each linear when `model` runs on random inputs; for the others, return why there is none.

    If `model` does not run or does not call a linear, the nearest model around the linear is run. `running` returns a
    context in which the model can run.
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
        except Exception as error:  # the user's model may raise anything; the linear is still proven alone
            reasons |= dict.fromkeys(waiting, in_brief(error))
        else:
            found |= {f"{prefix}{path}": caller for path, caller in calls.items()}
            reasons = {path: reason for path, reason in reasons.items() if path not in found}
    return found, reasons


def proven_alone(reasons: Mapping[str, str]) -> list[str]:
    """Notes for the plan on linears without a known caller."""
    by_reason: dict[str, list[str]] = {}
    for path, reason in reasons.items():
        by_reason.setdefault(reason, []).append(path)
    what = "proven alone, not inside the module that calls it"
    return [f"{what}: {', '.join(paths)} ({reason})" for reason, paths in by_reason.items()]


def _callers(model: nn.Module, linears: Mapping[str, nn.Module]) -> dict[str, Caller]:
    """Callers of the linears that run when `model` runs, by the linears' paths in it."""
    try:
        with shortened(model, linears.values()):
            return _recorded(model, linears, short=True)
    except Exception:  # its layers do not form a chain of hidden states
        return _recorded(model, linears, short=False)


def _recorded(model: nn.Module, linears: Mapping[str, nn.Module], short: bool) -> dict[str, Caller]:
    recorder = _Recorder(model, linears, short)
    recorder.run()
    for path in linears:
        recorder.note_caller(path, recorder.given)
    return recorder.found
