"""Trace: what flows between the linears of a layer, from one run of the model on meta, where nothing is computed.

Each operation inside a layer is noted with the storages that it reads and writes: views share theirs, so that a value
is followed through splits, transpositions, attention and caches alike.
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

from infuse.architectures.model_inputs import model_inputs, watched
from infuse.architectures.plain import linear_shape

_SHAPE_ONLY = ("_like", "new_")  # operations that take a tensor's shape, not its values


@dataclass(frozen=True)
class Event:
    """One operation, or one call of the linear at `linear`: the numbers of the storages that it reads and writes."""

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
    """The first call of each layer by its path, without layers that the model does not reach on meta.

    The model is unchanged.
    """
    tracer = _Tracer()
    training = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with tracer.watching(layers):
            tracer.run(model, torch.bfloat16)  # in which alone torch multiplies by experts on meta
            if len(tracer.done) < len(layers):
                tracer.run(model, torch.float32)
    finally:
        for module, was_training in training.items():
            module.training = was_training
    return tracer.done


def _all_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors of modules that are in several places once: functional_call would restore the second as one on meta."""
    for path, module in model.named_modules():
        for leaf, value in (*module._parameters.items(), *module._buffers.items()):
            if value is not None:
                yield f"{path}.{leaf}" if path else leaf, value


def _on_meta(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(like, dtype=dtype if like.is_floating_point() else like.dtype, device="meta")


class _Tracer(TorchDispatchMode):
    """Notes what happens inside layers while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.done: dict[str, Trace] = {}
        self._path = ""  # of the layer that runs now
        self._now: Trace | None = None
        self._inside_linear = False
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # storages: an address must not be given to another while we look

    def run(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Run `model` in `dtype` on meta, as far as it goes."""

        def make(kind: str, shape: tuple[int, ...]) -> Tensor:
            return torch.empty(shape, dtype=dtype if kind == "values" else torch.long, device="meta")

        tensors = {name: _on_meta(value, dtype) for name, value in _all_tensors(model)}
        try:
            inputs = model_inputs(model, make)
            inputs.pop("attention_mask", None)  # whose values models ask for
            with torch.no_grad(), warnings.catch_warnings(), self:
                warnings.simplefilter("ignore")  # of dtypes that the model's own run does not mix
                torch.func.functional_call(model, tensors, (), inputs, tie_weights=False)
        except Exception:  # noqa: S110  what needs values cannot be run on meta: what was reached is known
            pass
        self._now, self._inside_linear = None, False

    @contextmanager
    def watching(self, layers: Mapping[str, nn.Module]) -> Iterator[None]:
        """Note the calls of `layers` and of the linears in them."""
        inside = {f"{path}.{name}": module for path, layer in layers.items() for name, module in layer.named_modules()}
        linears = {path: module for path, module in inside.items() if linear_shape(module) is not None}
        with watched(layers, self._enter, self._leave), watched(linears, self._enter_linear, self._leave_linear):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:  # any value: only where it flows matters
            return 1.0 if args[0].is_floating_point() else args[0].dtype == torch.bool or 1
        if func is torch.ops.aten.nonzero.default:  # as if all were: experts are looked up by it
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
            # beside the hidden state: weights and biases of the attention's heads
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
        found = []
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._numbers:
                    self._numbers[storage._cdata] = len(self._numbers)
                    self._alive.append(storage)
                found.append(self._numbers[storage._cdata])
        return tuple(dict.fromkeys(found))
