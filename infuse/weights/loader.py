"""Sources of the values of new layers: a live model, or a checkpoint that is loaded into a live or meta model.

While a checkpoint is loaded, tensors of layers that will be replaced stay on meta. They are read when the new layer is
filled, or while the old one has to run. All other tensors are read once and placed. A failure restores the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from infuse.ground import interrupts, memory
from infuse.ground.device import device_of
from infuse.ground.dtype_cast import cast_buffers, kept_in_float32
from infuse.ground.temporary_hooks import TemporaryHooks, answered_by
from infuse.weights.computed import computed_tensors
from infuse.weights.fill import Wanted
from infuse.weights.lazy import InMemory, LazyTensor, Lookup, OnDevice, Rearranged, Transposed, live, tensor_at
from infuse.weights.mapped import StoredMatrix
from infuse.weights.model_tensors import ModelTensors
from infuse.weights.saved_shards import SavedShards
from infuse.weights.undo import put

CAST_VALUES = 1 << 20  # dequantize and cast in parts of this many values, to avoid holding a second copy
PART_VALUES = 1 << 22  # of the parts of a linear that is never whole in memory
# Cache budget of the proof, in bytes per value of the checkpoint: the size of the result in int4. The model runs
# through the same first layers a dozen times, and new pages take longer than reading.
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
        return device_of(self.model)

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

    def running(self) -> AbstractContextManager[None]:
        """Context in which the model can run."""
        return nullcontext()

    def loaded(
        self, path: str, *, dtype: torch.dtype | None = None, exact: Collection[str] = ()
    ) -> AbstractContextManager[None]:
        """Context in which the module at `path` has its original values: of a checkpoint in its dtype, or in `dtype`
        except the parameters of these names in the module. A live model keeps its dtypes.
        """
        return nullcontext()

    def loads_anew(self, path: str, dtype: torch.dtype) -> bool:
        """Whether `loaded` must be left before a new module is built, and entered anew for the values in `dtype`."""
        return False

    def row_parts(self, path: str) -> Iterable[nn.Linear] | None:
        """The linear at `path` as linears of some of its rows each, in order; one is in memory at a time.

        None: its values are in memory already, or it is small or more than a plain linear.
        """
        return None

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
    """Values of the live `model` for a dry run: closing `undo` reverts all changes."""

    def __init__(self, model: nn.Module, undo: ExitStack):
        super().__init__(model)
        self._undo = undo

    def put(self, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        put(self._undo, mapping, key, value)


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
        self._scratch = memory.Scratch()

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

    def step(self) -> None:
        interrupts.check()  # everything can still be restored
        self._drop_kept()

    def finish(self) -> None:
        """Read and place the parameters still on meta, which belong to layers that are kept."""
        modules = {id(module) for module in self.model.modules()}
        kept = [key for key, spots in self._spots.items() if any(id(module) in modules for module, _ in spots)]
        self._place(kept, None)
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        assert not any(tensor.is_meta for _, tensor in tensors), [name for name, tensor in tensors if tensor.is_meta]

    @contextmanager
    def loaded(
        self, path: str, *, dtype: torch.dtype | None = None, exact: Collection[str] = (), as_placed: bool = False
    ) -> Iterator[None]:
        """As in LayerSource; or with the values as they will be placed."""
        module = self.model.get_submodule(path)
        names = {id(parameter): name for name, parameter in module.named_parameters()}

        def read(parameter: nn.Parameter) -> Tensor:
            return self._for_proofs(parameter, None if names[id(parameter)] in exact else dtype, as_placed)

        with ExitStack() as undo:
            if _only_looks_up(module):  # exact in any dtype
                undo.enter_context(answered_by(module, partial(self._looked_up, module, False)))
            else:
                _put_values(module, read, undo)
            yield

    def loads_anew(self, path: str, dtype: torch.dtype) -> bool:
        module = self.model.get_submodule(path)
        sources = [self._tensors[self._names[id(p)]] for p in module.parameters() if p.is_meta]
        # New modules take over what is set on the old one, such as a forward that reads rows.
        return _only_looks_up(module) or any(_differs(source.dtype, dtype) for source in sources)

    def row_parts(self, path: str) -> Iterable[nn.Linear] | None:
        linear = self.model.get_submodule(path)
        if type(linear) is not nn.Linear or linear.weight.numel() <= PART_VALUES:
            return None
        if not all(parameter.is_meta for parameter in linear.parameters()) or not _is_bare(linear):
            return None
        if _is_transposed(self._tensors[self._names[id(linear.weight)]]):
            return None
        self._drop_kept()  # the new linear may be the largest matrix of the model
        return self._row_parts(linear)

    def _row_parts(self, linear: nn.Linear) -> Iterator[nn.Linear]:
        names = {leaf: self._names[id(parameter)] for leaf, parameter in linear.named_parameters()}
        rows = max(1, PART_VALUES // linear.in_features)
        for start in range(0, linear.out_features, rows):
            interrupts.check()
            taken = slice(start, min(start + rows, linear.out_features))
            part = nn.Linear(linear.in_features, taken.stop - start, linear.bias is not None, device="meta")
            for leaf, name in names.items():
                part._parameters[leaf] = nn.Parameter(self._read(name, None, taken), requires_grad=False)
            yield part

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context in which the model can run: each layer is read just before it runs and dropped after.

        Values are kept for the next run if the budget allows. Embeddings read only the rows that are looked up.
        """
        with ExitStack() as undo:
            hooks = undo.enter_context(TemporaryHooks())
            for path in self._layers:
                layer, open_now = self.model.get_submodule(path), ExitStack()
                if _only_looks_up(layer):
                    undo.enter_context(answered_by(layer, partial(self._looked_up, layer, True)))
                    continue
                undo.callback(open_now.close)
                hooks.before(layer, partial(self._open, path, open_now), prepend=True)
                hooks.after(layer, partial(_close, open_now), prepend=True)
            yield

    def _open(self, path: str, stack: ExitStack, module: nn.Module, args: Any) -> None:
        stack.enter_context(self.loaded(path, as_placed=True))

    def _looked_up(self, table: nn.Embedding, as_placed: bool, input: Tensor) -> Tensor:
        """The rows of an embedding on meta."""
        source = self._tensors[self._names[id(table.weight)]]
        numbers, places = input.unique(return_inverse=True)
        if numbers.numel() and not 0 <= int(numbers[0]) <= int(numbers[-1]) < table.num_embeddings:
            raise IndexError(f"index out of range in self: {int(numbers[0])} to {int(numbers[-1])}")
        if _is_transposed(source):
            return source.read().to(table.weight.dtype if as_placed else source.dtype)[input]
        rows = [source.read((slice(number, number + 1),)) for number in numbers.tolist()]
        values = torch.cat(rows) if rows else source.read((slice(0, 0),))
        return values.to(table.weight.dtype if as_placed else source.dtype)[places]

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

    def _for_proofs(self, parameter: nn.Parameter, dtype: torch.dtype | None, as_placed: bool) -> Tensor:
        """Read the values of a parameter. Those `as_placed` are kept for later runs if the budget allows."""
        name = self._names[id(parameter)]
        dtype = parameter.dtype if as_placed else dtype
        dtype = dtype if dtype is not None and _differs(self._tensors[name].dtype, dtype) else None
        value = self._kept.get((name, dtype))
        if value is None:
            value = self._read(name, dtype)
            if as_placed and value.nbytes <= self._room_bytes:
                self._room_bytes -= value.nbytes
                self._kept[name, dtype] = value
        return value

    def _drop_kept(self) -> None:
        self._room_bytes += sum(value.nbytes for value in self._kept.values())
        self._kept.clear()
        self._scratch.clear()

    def _read(self, name: str, dtype: torch.dtype | None, rows: slice = slice(None)) -> Tensor:
        """Read `rows` of the tensor `name` into temporary memory; dequantize and cast it in parts."""
        source = self._tensors[name]
        if source.dtype.is_floating_point and (source.coded is not None or dtype is not None):
            return self._in_parts(source, dtype or source.dtype, rows, self._scratch.empty)
        return source.read(() if rows == slice(None) else (rows,))

    def _value(self, name: str, dtype: torch.dtype) -> Tensor:
        """Read the tensor `name` to be placed in `dtype`."""
        source = self._tensors[name]
        if not _differs(source.dtype, dtype):
            return source.read()
        return self._in_parts(source, dtype, slice(None), memory.empty)

    def _in_parts(self, source: LazyTensor, dtype: torch.dtype, rows: slice, empty: Callable[..., Tensor]) -> Tensor:
        if not source.shape:
            return source.read().to(dtype)
        first, stop, _ = rows.indices(source.shape[0])
        value = empty((stop - first, *source.shape[1:]), dtype, self._device)
        step = max(1, CAST_VALUES * len(value) // max(value.numel(), 1))
        step = max(1, len(value)) if _is_transposed(source) else step
        for start in range(0, len(value), step):
            part = value[start : start + step]
            part.copy_(source.read((slice(first + start, first + start + len(part)),)))
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


def _differs(stored: torch.dtype, dtype: torch.dtype) -> bool:
    return stored.is_floating_point and stored != dtype


def _is_transposed(source: LazyTensor) -> bool:
    """Whether rows are columns of what is stored, so that reading some of them takes as long as reading all."""
    while isinstance(source, Rearranged):
        if isinstance(source, Transposed):
            return True
        source = source.source
    return False


def _is_bare(module: nn.Module) -> bool:
    """Whether calling the module only runs the forward of its class."""
    return "forward" not in vars(module) and not module._forward_hooks and not module._forward_pre_hooks


def _only_looks_up(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Whether the module is a plain embedding without values, which reads its weight only for its result."""
    if type(module) is not nn.Embedding or "forward" in vars(module):
        return False
    return module.max_norm is None and module.weight.is_meta


def _put_values(module: nn.Module, read: Callable[[nn.Parameter], Tensor], undo: ExitStack) -> None:
    """Give the parameters of `module` that are on meta their values until `undo`."""
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for leaf, parameter in owner._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(read(parameter), requires_grad=parameter.requires_grad)
            undo.callback(owner._parameters.__setitem__, leaf, parameter)
            owner._parameters[leaf] = made[id(parameter)]
