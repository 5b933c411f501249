"""Trace the data flow between the linears of a layer in one run of the model on meta, which computes nothing.

Each operation inside a layer is recorded with the storages that it reads and writes. Views share storage, so values can
be followed through splits, transpositions, attention and caches.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from infuse.architectures.foreign.plain import linear_shape
from infuse.architectures.part import named
from infuse.ground.temporary_hooks import watched
from infuse.ground.undisturbed import undisturbed
from infuse.inputs.model import model_inputs

_SHAPE_ONLY = ("_like", "new_")  # operations that take a tensor's shape, not its values


@dataclass(frozen=True)
class Event:
    """One operation, or one call of the linear at `linear`, with the numbers of the storages read and written."""

    linear: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass
class Trace:
    """One call of a layer: its operations in order, and the storage of the hidden state that it returns."""

    events: list[Event] = field(default_factory=list)
    returns: tuple[int, ...] = ()

    @property
    def linears(self) -> tuple[str, ...]:
        """The linears in the order of their first calls."""
        return tuple(dict.fromkeys(event.linear for event in self.events if event.linear))


def traced(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, Trace]:
    """Trace the first call of each layer, by path, leaving out layers that a run on meta does not reach."""
    tracer = _Tracer()
    with undisturbed(model):
        model.eval()
        with tracer.watching(layers):
            tracer.run(model, torch.bfloat16)  # torch's expert matmul on meta supports only bfloat16
            if len(tracer.done) < len(layers):
                tracer.run(model, torch.float32)
    return tracer.done


class _Tracer(TorchDispatchMode):
    """Record the operations inside layers while active."""

    def __init__(self) -> None:
        super().__init__()
        self.done: dict[str, Trace] = {}
        self._path = ""  # path of the running layer
        self._now: Trace | None = None
        self._inside_linear = False
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # keeps storages alive, so that no address is reused during the trace

    def run(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Run `model` in `dtype` on meta as far as possible."""

        def make(kind: str, shape: tuple[int, ...]) -> Tensor:
            return torch.empty(shape, dtype=dtype if kind == "values" else torch.long, device="meta")

        tensors = {}  # each module's once: functional_call would restore those of repeated modules as meta tensors
        for path, module in model.named_modules():
            for leaf, value in (*module._parameters.items(), *module._buffers.items()):
                if value is not None:
                    kept = dtype if value.is_floating_point() else value.dtype
                    tensors[named(path, leaf)] = torch.empty_like(value, dtype=kept, device="meta")
        try:
            inputs = model_inputs(model, make)
            inputs.pop("attention_mask", None)  # models branch on its values
            with torch.no_grad(), warnings.catch_warnings(), self:
                warnings.simplefilter("ignore")  # about mixed dtypes that a real run does not have
                torch.func.functional_call(model, tensors, (), inputs, tie_weights=False)
        except Exception:  # noqa: S110  code that needs values cannot run on meta; keep the layers reached so far
            pass
        self._now, self._inside_linear = None, False

    @contextmanager
    def watching(self, layers: Mapping[str, nn.Module]) -> Iterator[None]:
        """Record the calls of `layers` and of the linears in them."""
        inside = {f"{path}.{name}": module for path, layer in layers.items() for name, module in layer.named_modules()}
        linears = {path: module for path, module in inside.items() if linear_shape(module) is not None}
        with watched(layers, self._enter, self._leave), watched(linears, self._enter_linear, self._leave_linear):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:  # arbitrary value: only the data flow matters
            return 1.0 if args[0].is_floating_point() else args[0].dtype == torch.bool or 1
        if func is torch.ops.aten.nonzero.default:  # as if all were nonzero, so that all experts are visited
            return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.long)
        out = func(*args, **(kwargs or {}))
        if self._now is not None and not self._inside_linear:
            shape_only = any(word in func.__name__ for word in _SHAPE_ONLY)
            self._note("", () if shape_only else (args, kwargs), out)
        return out

    def _enter(self, path: str, args: tuple, kwargs: dict[str, Any]) -> None:
        if self._now is None and path not in self.done:
            self._now, self._path = Trace(), path

    def _leave(self, path: str, args: tuple, output: Any) -> None:
        if self._now is not None and self._path == path:
            # only the hidden state: further outputs are attention weights and biases per head
            self._now.returns = self._storages(output)[:1]
            self.done[path], self._now = self._now, None

    def _enter_linear(self, path: str, args: tuple, kwargs: dict[str, Any]) -> None:
        self._inside_linear = self._now is not None

    def _leave_linear(self, path: str, args: tuple, output: Any) -> None:
        self._inside_linear = False
        if path.startswith(f"{self._path}."):
            self._note(path.removeprefix(f"{self._path}."), args, output)

    def _note(self, linear: str, read: Any, written: Any) -> None:
        if self._now is not None:
            self._now.events.append(Event(linear, self._storages(read), self._storages(written)))

    def _storages(self, value: Any) -> tuple[int, ...]:
        numbers = []
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._numbers:
                    self._numbers[storage._cdata] = len(self._numbers)
                    self._alive.append(storage)
                numbers.append(self._numbers[storage._cdata])
        return tuple(dict.fromkeys(numbers))
