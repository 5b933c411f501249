"""Prove a linear inside the module that calls it, because a caller may read more of a linear than its output.

One run of the model on random inputs, with few of its layers, finds each linear's caller and its arguments. The caller
then runs twice: with new linears in place of the originals, and with the originals using the new ones' forwards. Both
must give the same result, whatever rounding the new linears add. It runs in the model's own dtype, as recorded, and
once for all linears in one call of it, because it may be slow.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from infuse.ground.errors import CheckpointError, in_brief
from infuse.ground.temporary_hooks import StopModel, TemporaryHooks, answered_by, watched
from infuse.inputs.model import SEED, random_inputs
from infuse.plan.found import models_around
from infuse.proof.compare import STRUCTURE_TOLERANCE, distance
from infuse.unknown.install import places_of


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

    def run(self) -> dict[str, Caller]:
        """Run the model on random inputs until all linears have been called."""
        around = {parent: self.model.get_submodule(parent) for path in self.linears for parent in _around(path)}
        with watched(around, self._enter, self._leave), watched(self.linears, self._called, self._returned):
            self.model(**random_inputs(self.model))
        for path in self.linears:
            self._note_caller(path, self.given)
        return self.found

    def _note_caller(self, path: str, among: Iterable[str]) -> None:
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
        self._note_caller(path, self.running)

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

    If `model` does not run or does not call a linear, the models around the linear are run, nearest first. `running`
    returns a context in which the model can run.
    """
    callers: dict[str, Caller] = {}
    reasons = dict.fromkeys(paths, "the model does not call it")
    for owner in dict.fromkeys(["", *(around for path in reasons for around in models_around(model, path))]):
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
            callers |= {f"{prefix}{path}": caller for path, caller in calls.items()}
            reasons = {path: reason for path, reason in reasons.items() if path not in callers}
    return callers, reasons


def proven_alone(reasons: Mapping[str, str]) -> list[str]:
    """Notes for the plan on linears without a known caller."""
    by_reason: dict[str, list[str]] = {}
    for path, reason in reasons.items():
        by_reason.setdefault(reason, []).append(path)
    what = "proven alone, not inside the module that calls it"
    return [f"{what}: {', '.join(paths)} ({reason})" for reason, paths in by_reason.items()]


def _callers(model: nn.Module, linears: Mapping[str, nn.Module]) -> dict[str, Caller]:
    """Run `model` and return the callers of the linears that ran, by the linears' paths."""
    try:
        with shortened(model, linears.values()):
            return _Recorder(model, linears, short=True).run()
    except Exception:  # its layers do not form a chain of hidden states
        return _Recorder(model, linears, short=False).run()


def in_place_mismatch(caller: Caller, linears: Mapping[str, nn.Module]) -> str | None:
    """Return why `caller` behaves differently with these at their paths than with its linears; None if it does not."""
    found = [(caller.module.get_submodule(path), new) for path, new in linears.items()]
    places = places_of([old for old, _ in found], caller.module)  # the caller may use one in several places
    keep = tuple(module for pair in found for module in pair)
    with ExitStack() as answers:
        for old, new in found:
            answers.enter_context(answered_by(old, new.forward))
        wanted = _tensors(_run(caller, keep))
    try:
        for old, new in found:
            for holder, name in places[id(old)]:
                holder._modules[name] = new
        actual = _tensors(_run(caller, keep))
    except Exception as error:  # e.g. it reads an attribute that the new linear lacks
        return f"{type(caller.module).__name__} around it fails with the new linear: {in_brief(error)}"
    finally:
        for old, _ in found:
            for holder, name in places[id(old)]:
                holder._modules[name] = old
    if len(actual) == len(wanted) and all(_same(a, b) for a, b in zip(actual, wanted, strict=True)):
        return None
    return f"{type(caller.module).__name__} around it reads more of it than what it returns, and gives other values"


def _run(caller: Caller, keep: tuple[nn.Module, ...]) -> Any:
    args, kwargs = copy.deepcopy((caller.args, caller.kwargs))
    short = shortened(caller.module, keep) if caller.short else nullcontext()
    with short, torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return caller.module(*args, **kwargs)


def _tensors(value: Any) -> list[Tensor]:
    """List the tensors of an output in order, except those in caches."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def _same(actual: Tensor, wanted: Tensor) -> bool:
    """True if two results are equal up to summation order."""
    if actual.dtype != wanted.dtype or actual.shape != wanted.shape:
        return False
    if not actual.is_floating_point():
        return torch.equal(actual, wanted)
    if torch.allclose(actual, wanted, equal_nan=True):
        return True
    return distance(actual, wanted.float()) <= max(STRUCTURE_TOLERANCE, torch.finfo(actual.dtype).eps)


@contextmanager
def shortened(model: nn.Module, keep: Iterable[nn.Module]) -> Iterator[None]:
    """Run `model` with one layer per class in each list of layers, plus the layers that contain a module of `keep`.

    Linears in a list, such as one head for each codebook, are no layers of a chain.
    """
    kept = {id(module) for module in keep}
    with ExitStack() as undo:
        hooks = undo.enter_context(TemporaryHooks())
        for layers in [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]:
            first: dict[tuple, list[Any]] = {}
            for layer in dict.fromkeys(layers):  # one layer may be listed several times
                like = (type(layer), tuple(parameter.shape for parameter in layer.parameters()))
                if like not in first:
                    first[like] = []
                    hooks.after(layer, partial(_note, first[like]))
                elif any(True for _ in layer.children()) and not any(id(each) in kept for each in layer.modules()):
                    _skip(layer, first[like], undo)
        yield


def _note(returned: list[Any], module: nn.Module, args: Any, output: Any) -> None:
    returned[:] = [output]


def _skip(layer: nn.Module, returned: list[Any], undo: ExitStack) -> None:
    """Make `layer` return its input until `undo`. Its hooks are not called, because one may load its weights."""
    # It stays in place, because transformers looks up layers by class, and only once.
    for hooks in (layer._forward_pre_hooks, layer._forward_hooks):
        undo.callback(hooks.update, dict(hooks))
        hooks.clear()
    undo.enter_context(answered_by(layer, partial(_hand_on, returned)))


def _hand_on(returned: list[Any], *args: Any, **kwargs: Any) -> Any:
    """Return the layer's input hidden states in the output format of the last similar layer that ran."""
    hidden = args[0] if args else kwargs["hidden_states"]
    return (hidden, *output[1:]) if returned and isinstance(output := returned[0], tuple) else hidden
