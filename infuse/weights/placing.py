"""Placing: a checkpoint's way into a model, live or on meta, in which nothing is changed for good before all is there.

What lies in layers that will be replaced stays on meta: it is read when the new layer is filled, or for as long as the
old one has to run. All else is read once and placed. Whatever fails, the model gets back every tensor and module that
it had.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from infuse import interrupts, memory
from infuse.errors import CheckpointError
from infuse.parallel.slices import Cut
from infuse.weights.names import ModelReader
from infuse.weights.reader import Part, tensor_at
from infuse.weights.saved_shards import SavedShards

CAST_VALUES = 1 << 20  # a table is cast in parts of so many values, so that it is never there twice
_Spot = tuple[nn.Module, str]
_MISSING = object()


class Placing:
    """`with placing:` takes the model over; leaving by an exception gives it back as it was.

    `layers` are the paths of the modules that will be replaced; `saved`: the checkpoint has what replaces them. Raises
    CheckpointError, before the `with`, where a computed buffer that is on meta cannot be made again.
    """

    def __init__(
        self,
        model: nn.Module,
        reader: ModelReader,
        layers: Iterable[str],
        dtype: torch.dtype,
        device: torch.device,
        *,
        saved: bool = False,
    ):
        self.model, self.reader, self.dtype, self.device = model, reader, dtype, device
        self.layers, self.saved = tuple(dict.fromkeys(layers)), saved
        self._computed = computed_tensors(model)
        self._before: list[tuple[MutableMapping[str, Any], str, Any]] = []
        self._names: dict[int, str] = {}  # by placeholder
        self._spots: dict[int, list[_Spot]] = {}

    def put(self, mapping: MutableMapping[str, Any], key: str, value: Any) -> None:
        """mapping[key] = value, until an exception."""
        self._before.append((mapping, key, mapping.get(key, _MISSING)))
        mapping[key] = value

    def __enter__(self) -> Placing:
        names: dict[int, str] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), name)
        made: dict[int, nn.Parameter] = {}
        for module in self.model.modules():
            for leaf, held in list(module._parameters.items()):
                if held is None:
                    continue
                if id(held) not in made:
                    dtype = self.dtype if held.is_floating_point() else held.dtype
                    empty = torch.empty(held.shape, dtype=dtype, device="meta")
                    made[id(held)] = nn.Parameter(empty, requires_grad=held.requires_grad)
                placeholder = made[id(held)]
                self._names[id(placeholder)] = names[id(held)]
                self._spots.setdefault(id(placeholder), []).append((module, leaf))
                self.put(module._parameters, leaf, placeholder)
        try:
            for owner, leaf, value in self._computed:
                self.put(owner, leaf, value.to(self.device))
            self._place_buffers()
        except BaseException as error:  # `with` does not call __exit__ then
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            for mapping, key, value in reversed(self._before):
                if value is _MISSING:
                    mapping.pop(key, None)
                else:
                    mapping[key] = value
        self._before.clear()

    def place_rest(self, progress: Callable[[int, int, str], None] | None = None) -> None:
        """Read and place what is, in part at least, outside of the layers: tied weights go to all their places."""
        inside = {id(module) for path in self.layers for module in self.model.get_submodule(path).modules()}
        rest = [key for key, spots in self._spots.items() if any(id(module) not in inside for module, _ in spots)]
        self._place(rest, progress)

    def place_left(self) -> None:
        """Read and place what is still on meta: of layers that stay as they are."""
        modules = {id(module) for module in self.model.modules()}
        self._place(
            [key for key, spots in self._spots.items() if any(id(module) in modules for module, _ in spots)], None
        )
        on_meta = [
            name for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()) if tensor.is_meta
        ]
        assert not on_meta, on_meta

    @contextlib.contextmanager
    def loaded(self, path: str, dtype: torch.dtype | None) -> Iterator[None]:
        """The module at `path` with its values, in `dtype` (None: as the checkpoint has them), for as long as the
        `with` runs.
        """
        module = self.model.get_submodule(path)
        with contextlib.ExitStack() as undo:
            made: dict[int, nn.Parameter] = {}
            for owner in module.modules():
                for leaf, held in owner._parameters.items():
                    if held is None or not held.is_meta:
                        continue
                    if id(held) not in made:
                        made[id(held)] = nn.Parameter(
                            self._value(self._names[id(held)], dtype), requires_grad=held.requires_grad
                        )
                    undo.callback(owner._parameters.__setitem__, leaf, held)
                    owner._parameters[leaf] = made[id(held)]
            yield

    @contextlib.contextmanager
    def streaming(self) -> Iterator[None]:
        """The model can run: each layer is read before its turn and dropped after it, so that one is there at a time."""
        with contextlib.ExitStack() as undo:
            for path in self.layers:
                layer, open_now = self.model.get_submodule(path), contextlib.ExitStack()

                def before(
                    module: nn.Module, args: Any, path: str = path, stack: contextlib.ExitStack = open_now
                ) -> None:
                    stack.enter_context(self.loaded(path, self.dtype))

                def after(module: nn.Module, args: Any, output: Any, stack: contextlib.ExitStack = open_now) -> None:
                    stack.close()

                undo.callback(open_now.close)
                undo.callback(layer.register_forward_pre_hook(before, prepend=True).remove)
                undo.callback(layer.register_forward_hook(after, prepend=True).remove)
            yield

    def source(self, path: str) -> LayerReader:
        """The values of the layer at `path`, by their names in it."""
        return LayerReader(self, path)

    def stored(self, name: str, cut: Cut | None) -> Tensor | None:
        """A tensor of our shards by its name there, or a rank's part of it; None where they have none."""
        assert isinstance(self.reader.checkpoint, SavedShards)
        found = self.reader.checkpoint.part(name, cut)
        return None if found is None else found.to(self.device)

    def value(self, name: str, part: Part = ()) -> Tensor:
        return self.reader.read(name, part).to(self.device)

    def _place(self, keys: list[int], progress: Callable[[int, int, str], None] | None) -> None:
        waiting = [key for key in keys if self._spots[key][0][0]._parameters[self._spots[key][0][1]].is_meta]  # type: ignore[union-attr]
        for done, key in enumerate(waiting):
            interrupts.check()
            owner, leaf = self._spots[key][0]
            placeholder = owner._parameters[leaf]
            assert placeholder is not None
            value = self._value(self._names[key], self.dtype)
            placed = nn.Parameter(value, requires_grad=placeholder.requires_grad)
            for spot, name in self._spots[key]:
                self.put(spot._parameters, name, placed)
            if progress:
                progress(done + 1, len(waiting), "loading")

    def _value(self, name: str, dtype: torch.dtype | None) -> Tensor:
        """The tensor of that name, cast in parts where it has to be cast."""
        stored = self.reader.dtype(name)
        if dtype is None or not stored.is_floating_point or dtype == stored:
            return self.value(name)
        value = memory.empty(self.reader.shapes[name], dtype, self.device)
        if value.dim() == 0:
            return value.copy_(self.value(name))
        rows = max(1, CAST_VALUES * value.shape[0] // max(value.numel(), 1))
        for start in range(0, value.shape[0], rows):
            value[start : start + rows] = self.value(name, (slice(start, start + rows),))
        return value

    def _place_buffers(self) -> None:
        """Persistent buffers, in the dtype that the model has them in."""
        seen: set[int] = set()
        for path, module in self.model.named_modules():
            if id(module) in seen:
                continue
            seen.add(id(module))
            for leaf, buffer in list(module._buffers.items()):
                name = f"{path}.{leaf}" if path else leaf
                if buffer is None or leaf in module._non_persistent_buffers_set or name not in self.reader:
                    continue
                self.put(module._buffers, leaf, self.value(name).to(buffer.dtype))


class LayerReader:
    """A layer's values by their names in it: from the model what is placed there, else from the checkpoint."""

    def __init__(self, placing: Placing, path: str):
        self._placing, self._path, self._module = placing, path, placing.model.get_submodule(path)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(tensor_at(self._module, name).shape)

    def read(self, name: str, part: Part = ()) -> Tensor:
        held = tensor_at(self._module, name)
        if held.is_meta:
            return self._placing.value(f"{self._path}.{name}", part)
        return held[part] if part else held


# --- what no checkpoint has ---------------------------------------------------------------------------------------


def computed_tensors(model: nn.Module) -> list[tuple[MutableMapping[str, Any], str, Tensor]]:
    """Where the model has tensors that it computes itself (rotary frequencies), and their values: anew where they are
    on meta.

    They are those that a new model of the same class and config has: its parameters are made on meta, so that it costs
    nothing.
    """
    found: list[tuple[MutableMapping[str, Any], str, Tensor]] = []
    lost: list[str] = []
    twins: list[tuple[str, dict[str, nn.Module]]] = []
    optional = set(model.state_dict())
    for path, module in model.named_modules():
        buffers = module._buffers
        plain = {leaf: value for leaf, value in vars(module).items() if isinstance(value, Tensor) and value.is_meta}
        for leaf, value in [*buffers.items(), *plain.items()]:
            name = f"{path}.{leaf}" if path else leaf
            persistent = name in optional
            if value is None or (persistent and not value.is_meta):
                continue
            owner: Any = buffers if leaf in buffers else vars(module)
            if value.is_meta:
                if not twins:
                    twins = [(root, dict(_twin(part).named_modules())) for root, part in _models(model)]
                again = _in_twin(twins, path, leaf)
                if again is None:
                    if not persistent:
                        lost.append(name)
                    continue
                value = again
            found.append((owner, leaf, value))
    if lost:
        raise CheckpointError(
            f"the model computes these itself, they are on meta, and it cannot be made anew from its config: "
            f"{', '.join(lost)}; make the model with its buffers on the CPU"
        )
    return found


def _models(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that are made from a config alone."""
    if hasattr(model, "config") and hasattr(model, "base_model_prefix"):
        yield path, model
        return
    for name, child in model.named_children():
        yield from _models(child, f"{path}.{name}" if path else name)


def _twin(model: nn.Module) -> nn.Module:
    """A new model of the same class and config: buffers computed on the CPU, parameters on meta."""

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta:
            return parameter
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    before, handle = torch.get_default_dtype(), register_module_parameter_registration_hook(on_meta)
    try:
        torch.set_default_dtype(torch.float32)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            make: Any = type(model)
            return make(copy.deepcopy(model.config))
    except Exception as error:  # whatever a class of the user's asks for
        raise CheckpointError(
            f"{type(model).__name__} cannot be made anew from its config, to compute its buffers: {error}"
        ) from error
    finally:
        torch.set_default_dtype(before)
        handle.remove()


def _in_twin(twins: list[tuple[str, dict[str, nn.Module]]], path: str, leaf: str) -> Tensor | None:
    for root, modules in twins:
        if path == root or not root or path.startswith(f"{root}."):
            module = modules.get(path.removeprefix(root).removeprefix("."))
            found = None if module is None else module._buffers.get(leaf, vars(module).get(leaf))
            return found if isinstance(found, Tensor) and not found.is_meta else None
    return None
