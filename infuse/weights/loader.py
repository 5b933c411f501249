"""Sources of the values of new layers: a live model, or a checkpoint that is loaded into a live or meta model.

While a checkpoint is loaded, tensors of layers that will be replaced stay on meta. They are read when the new layer is
filled, or while the old one has to run. All other tensors are read once and placed. A failure restores the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from infuse import interrupts, memory
from infuse.dtype_cast import cast_buffers, kept_in_float32
from infuse.temporary_hooks import TemporaryHooks
from infuse.weights.computed import computed_tensors
from infuse.weights.fill import Wanted
from infuse.weights.lazy import InMemory, LazyTensor, Lookup, OnDevice, live, tensor_at
from infuse.weights.mapped import StoredMatrix
from infuse.weights.model_tensors import ModelTensors
from infuse.weights.saved_shards import SavedShards
from infuse.weights.undo import put

CAST_VALUES = 1 << 20  # cast tables in parts of this many values, to avoid holding a second copy
# Cache budget of the proof, in bytes per value of the checkpoint: the size of the result in int4. Proofs run the same
# first layers a dozen times, and new pages take longer than reading.
KEPT_BYTES = 4.25 / 8
_Spot = tuple[nn.Module, str]


class LayerSource:
    """Values held by the live `model`.

    `is_live`: all values are in memory and the model runs in its own dtypes; otherwise layers may be on meta.
    `holds_replaced`: the source holds tensors of layers that were already replaced and proven when it was saved.
    """

    is_live, holds_replaced = True, False

    def __init__(self, model: nn.Module):
        self.model = model

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def put(self, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        """Set an entry of a module's mapping. On a live model this cannot be undone."""
        mapping[key] = value

    def begin(self, progress: Callable[[int, int, str], None] | None) -> None:
        """Load all values outside of the layers that will be replaced."""

    def step(self) -> None:
        """Called before each layer is replaced."""
        interrupts.tell("the layers are being replaced")

    def finish(self) -> None:
        """Load all values that are still missing."""

    def hand_on(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        """Cast a parameter that a new module takes over to `dtype`, in place for all modules that share it."""
        parameter.data = memory.copied(parameter.data, dtype)

    def running(self) -> AbstractContextManager[None]:
        """Context in which the model can run."""
        return nullcontext()

    def loaded(self, path: str) -> AbstractContextManager[None]:
        """Context in which the module at `path` has its original values."""
        return nullcontext()

    def tensors(self, path: str) -> Lookup:
        """Look up the tensors of the module at `path` by their names within it."""
        return live(self.model.get_submodule(path))

    def saved(self, name: str, wanted: Wanted) -> LazyTensor:
        """A tensor of a layer saved as replaced, or this rank's part of it. KeyError: a live model has none."""
        raise KeyError(name)

    def stored_experts(self, matrix: Any, path: str, tensors: Mapping[str, Wanted]) -> StoredMatrix | None:
        """See SavedSource. KeyError: a live model has none."""
        raise KeyError(path)


class Rehearsal(LayerSource):
    """Values of the live `model` for a dry run: closing `undo` reverts all changes, and parameters are not cast."""

    def __init__(self, model: nn.Module, undo: ExitStack):
        super().__init__(model)
        self._undo = undo

    def put(self, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        put(self._undo, mapping, key, value)

    def hand_on(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        """Do nothing: the module that takes over the parameter is discarded."""


class CheckpointLoader(LayerSource):
    """Load a checkpoint's values. `with loader:` takes over the model; an exception restores it.

    `layers` are the paths of the modules that will be replaced. Raises CheckpointError, before the `with`, if a
    computed buffer on meta cannot be recomputed.
    """

    is_live = False

    def __init__(
        self, model: nn.Module, source: ModelTensors, layers: Iterable[str], dtype: torch.dtype, device: torch.device
    ):
        super().__init__(model)
        self.holds_replaced = source.checkpoint is not None and source.checkpoint.holds_replaced
        self._checkpoint = source.checkpoint
        self._tensors = {name: OnDevice(tensor, device) for name, tensor in source.tensors.items()}
        self._dtype, self._device, self._layers = dtype, device, tuple(dict.fromkeys(layers))
        self._computed = computed_tensors(model)
        self._undo = ExitStack()
        self._names: dict[int, str] = {}  # keyed by id of the placeholder, as is _spots
        self._spots: dict[int, list[_Spot]] = {}
        self._room_bytes = int(KEPT_BYTES * sum(math.prod(tensor.shape) for tensor in self._tensors.values()))
        self._kept: dict[tuple[str, torch.dtype | None], Tensor] = {}
        self._loaded: set[int] = set()  # ids of parameters that have their values temporarily

    def __enter__(self) -> CheckpointLoader:
        names: dict[int, str] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), name)
        made: dict[int, nn.Parameter] = {}
        exact = kept_in_float32(self.model, self._dtype)
        for module in self.model.modules():
            for leaf, original in list(module._parameters.items()):
                if original is None:
                    continue
                if id(original) not in made:
                    dtype = self._dtype if original.is_floating_point() else original.dtype
                    dtype = torch.float32 if names[id(original)] in exact else dtype
                    empty = torch.empty(original.shape, dtype=dtype, device="meta")
                    made[id(original)] = nn.Parameter(empty, requires_grad=original.requires_grad)
                placeholder = made[id(original)]
                self._names[id(placeholder)] = names[id(original)]
                self._spots.setdefault(id(placeholder), []).append((module, leaf))
                self.put(module._parameters, leaf, placeholder)
        try:
            for owner, leaf, value in self._computed:
                self.put(owner, leaf, value.to(self._device))
            self._place_buffers()
        except BaseException as error:  # `with` does not call __exit__ if __enter__ raises
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._undo.close()
        self._undo.pop_all()  # keep the changes

    @property
    def device(self) -> torch.device:
        return self._device

    def put(self, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        put(self._undo, mapping, key, value)

    def begin(self, progress: Callable[[int, int, str], None] | None) -> None:
        self.place_rest(progress)
        cast_buffers(self.model, self._dtype, self.put)  # parameters are already placed in this dtype

    def place_rest(self, progress: Callable[[int, int, str], None] | None = None) -> None:
        """Read and place every tensor used outside the layers; a tied weight goes to all its places."""
        inside = {id(module) for path in self._layers for module in self.model.get_submodule(path).modules()}
        rest = [key for key, spots in self._spots.items() if any(id(module) not in inside for module, _ in spots)]
        self._place(rest, progress)

    def hand_on(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        """Do nothing: parameters are already placed in the target dtype."""

    def step(self) -> None:
        interrupts.check()  # everything can still be restored
        self._kept.clear()

    def finish(self) -> None:
        """Read and place the parameters still on meta, which belong to layers that are kept."""
        modules = {id(module) for module in self.model.modules()}
        kept = [key for key, spots in self._spots.items() if any(id(module) in modules for module, _ in spots)]
        self._place(kept, None)
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        assert not any(tensor.is_meta for _, tensor in tensors), [name for name, tensor in tensors if tensor.is_meta]

    @contextmanager
    def loaded(self, path: str, *, as_placed: bool = False) -> Iterator[None]:
        """Context in which the module at `path` has its values, in the checkpoint's dtype or as they will be placed."""
        module = self.model.get_submodule(path)
        with ExitStack() as undo:
            made: dict[int, nn.Parameter] = {}
            for owner in module.modules():
                for leaf, parameter in owner._parameters.items():
                    if parameter is None or not parameter.is_meta:
                        continue
                    if id(parameter) not in made:
                        value = self._for_proofs(self._names[id(parameter)], parameter.dtype if as_placed else None)
                        made[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                        self._loaded.add(id(made[id(parameter)]))
                        undo.callback(self._loaded.discard, id(made[id(parameter)]))
                    undo.callback(owner._parameters.__setitem__, leaf, parameter)
                    owner._parameters[leaf] = made[id(parameter)]
            yield

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context in which the model can run: each layer is read just before it runs and dropped after."""
        with ExitStack() as undo:
            hooks = undo.enter_context(TemporaryHooks())
            for path in self._layers:
                layer, open_now = self.model.get_submodule(path), ExitStack()
                undo.callback(open_now.close)
                hooks.before(layer, partial(self._open, path, open_now), prepend=True)
                hooks.after(layer, partial(_close, open_now), prepend=True)
            yield

    def _open(self, path: str, stack: ExitStack, module: nn.Module, args: Any) -> None:
        stack.enter_context(self.loaded(path, as_placed=True))

    def tensors(self, path: str) -> Lookup:
        """Look up a layer's tensors by their names in it: in the model if already placed, else in the checkpoint.

        Coded tensors keep their codes, also while the model has their values, for a proof or in another place.
        """
        module = self.model.get_submodule(path)

        def lookup(name: str) -> LazyTensor:
            tensor, stored = tensor_at(module, name), self._tensors.get(f"{path}.{name}")
            if stored is not None and tensor.is_meta:
                return stored
            return InMemory(tensor, None if stored is None else stored.coded)

        return lookup

    def saved(self, name: str, wanted: Wanted) -> LazyTensor:
        assert isinstance(self._checkpoint, SavedShards)
        return OnDevice(self._checkpoint.part(name, wanted), self._device)

    def stored_experts(self, matrix: Any, path: str, tensors: Mapping[str, Wanted]) -> StoredMatrix | None:
        assert isinstance(self._checkpoint, SavedShards)
        stored = self._checkpoint.experts(path, tensors, matrix.experts, matrix.layout)
        return None if stored is None else replace(stored, device=self._device)

    def _place(self, keys: list[int], progress: Callable[[int, int, str], None] | None) -> None:
        waiting = [key for key in keys if self._placeholder(key).is_meta]
        for done, key in enumerate(waiting):
            interrupts.check()
            placeholder = self._placeholder(key)
            value = self._value(self._names[key], placeholder.dtype)
            placed = nn.Parameter(value, requires_grad=placeholder.requires_grad)
            for spot, name in self._spots[key]:
                self.put(spot._parameters, name, placed)
            if progress:
                progress(done + 1, len(waiting), "loading")

    def _placeholder(self, key: int) -> nn.Parameter:
        owner, leaf = self._spots[key][0]
        parameter = owner._parameters[leaf]
        assert parameter is not None
        return parameter

    def _for_proofs(self, name: str, dtype: torch.dtype | None) -> Tensor:
        """Read the tensor `name`; keep it for later proofs if the budget allows."""
        dtype = None if dtype == self._tensors[name].dtype else dtype
        value = self._kept.get((name, dtype))
        if value is None:
            value = self._value(name, dtype)
            if value.nbytes <= self._room_bytes:
                self._room_bytes -= value.nbytes
                self._kept[name, dtype] = value
        return value

    def _value(self, name: str, dtype: torch.dtype | None) -> Tensor:
        """Read the tensor `name`; cast it in parts if needed."""
        source = self._tensors[name]
        if dtype is None or not source.dtype.is_floating_point or dtype == source.dtype:
            return source.read()
        value = memory.empty(source.shape, dtype, self._device)
        if value.dim() == 0:
            return value.copy_(source.read())
        rows = max(1, CAST_VALUES * value.shape[0] // max(value.numel(), 1))
        for start in range(0, value.shape[0], rows):
            value[start : start + rows] = source.read((slice(start, start + rows),))
        return value

    def _place_buffers(self) -> None:
        """Place the persistent buffers, in the dtypes that the model has them in."""
        for path, module in self.model.named_modules():
            for leaf, buffer in list(module._buffers.items()):
                name = f"{path}.{leaf}" if path else leaf
                if buffer is None or leaf in module._non_persistent_buffers_set or name not in self._tensors:
                    continue
                self.put(module._buffers, leaf, self._tensors[name].read().to(buffer.dtype))


def _close(stack: ExitStack, module: nn.Module, args: Any, output: Any) -> None:
    stack.close()
