"""The proof of a linear inside the module that calls it: callers may read more of a linear than what it returns.

The model runs once, in its own dtype, and what each caller was given is recorded. The caller then runs twice: with the
new linear in its place, and with the original there, whose forward alone is the new one's. Both must give the same,
whatever the new linear rounds.
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

from infuse.architectures.model_inputs import SEED, StopModel, random_inputs, watched
from infuse.errors import CheckpointError
from infuse.plan.found import model_around
from infuse.proof.compare import STRUCTURE_TOLERANCE, distance


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
        with _shortened(model, linears.values()):
            return _recorded(model, linears, short=True)
    except Exception:  # its layers are no chain of hidden states
        return _recorded(model, linears, short=False)


def _recorded(model: nn.Module, linears: Mapping[str, nn.Module], short: bool) -> dict[str, Caller]:
    recorder = _Recorder(model, linears, short)
    recorder.run()
    for path in linears:
        recorder.note_caller(path, recorder.given)
    return recorder.found


@contextmanager
def _shortened(model: nn.Module, keep: Iterable[nn.Module]) -> Iterator[None]:
    """Run `model` with one layer for each class in its lists of layers, and with those that hold a module of `keep`."""
    kept = {id(module) for module in keep}
    with ExitStack() as undo:
        for layers in [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]:
            first: dict[tuple, list[Any]] = {}
            for layer in dict.fromkeys(layers):  # one layer may be there several times
                like = (type(layer), tuple(parameter.shape for parameter in layer.parameters()))
                if like not in first:
                    first[like] = []
                    undo.callback(layer.register_forward_hook(partial(_note, first[like])).remove)
                elif not any(id(module) in kept for module in layer.modules()):
                    _skip(layer, first[like], undo)
        yield


def _note(returned: list[Any], module: nn.Module, args: Any, output: Any) -> None:
    returned[:] = [output]


def _skip(layer: nn.Module, returned: list[Any], undo: ExitStack) -> None:
    """Let `layer` hand on what it is given, until `undo`. It stays where it is: transformers looks for layers by their
    class, once.

    Its hooks of now are not called (one of them may load its weights); those that are registered meanwhile stay.
    """
    for hooks in (layer._forward_pre_hooks, layer._forward_hooks):
        undo.callback(hooks.update, dict(hooks))
        hooks.clear()
    if "forward" in vars(layer):
        undo.callback(setattr, layer, "forward", vars(layer)["forward"])
    else:
        undo.callback(delattr, layer, "forward")
    layer.forward = partial(_hand_on, returned)  # type: ignore[method-assign]


def _hand_on(returned: list[Any], *args: Any, **kwargs: Any) -> Any:
    """The hidden states that a layer is given, in the form in which a layer like it has returned them."""
    hidden = args[0] if args else kwargs["hidden_states"]
    return (hidden, *output[1:]) if returned and isinstance(output := returned[0], tuple) else hidden


def in_place_mismatch(caller: Caller, new: nn.Module) -> str | None:
    """Why `caller` does not do with `new` what it does with the linear that is there, None if it does."""
    where, _, name = caller.path.rpartition(".")
    holder = caller.module.get_submodule(where)
    old = holder._modules[name]
    assert old is not None
    own = vars(old).get("forward")
    try:
        old.forward = new.forward  # type: ignore[method-assign]
        wanted = _tensors(_run(caller))
    finally:
        del old.forward
        if own is not None:
            old.forward = own  # type: ignore[method-assign]
    holder._modules[name] = new
    try:
        found = _tensors(_run(caller))
    except Exception as error:  # it reads what the new linear does not have
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        return f"{type(caller.module).__name__} around it fails with the new linear: {reason}"
    finally:
        holder._modules[name] = old
    if len(found) == len(wanted) and all(_same(a, b) for a, b in zip(found, wanted, strict=True)):
        return None
    return f"{type(caller.module).__name__} around it reads more of it than what it returns, and gives other values"


def _run(caller: Caller) -> Any:
    args, kwargs = copy.deepcopy((caller.args, caller.kwargs))
    short = _shortened(caller.module, ()) if caller.short else nullcontext()
    with short, torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return caller.module(*args, **kwargs)


def _tensors(value: Any) -> list[Tensor]:
    """The tensors of an output, in order; those in caches are not among them."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def _same(found: Tensor, wanted: Tensor) -> bool:
    """Whether two results are equal, but for what the order of a sum does."""
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return False
    if not found.is_floating_point():
        return torch.equal(found, wanted)
    if torch.allclose(found, wanted, equal_nan=True):
        return True
    return distance(found, wanted.float()) <= max(STRUCTURE_TOLERANCE, torch.finfo(found.dtype).eps)
