"""Skeletons: what is left of replaced modules, without memory for weights, for the way back.

Whoever holds a replaced module or a Parameter, as an optimizer does, keeps it alive, and the model gets that object
back. Of what nobody holds, a skeleton without tensors is left, which takes the values of the replacement.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from infuse.architectures.part import named
from infuse.ground import memory

_ALIGNED = 64  # bytes, as PyTorch aligns what it allocates: from elsewhere, a product may sum up in another order
_LARGE = 1 << 12  # bytes of a buffer of which equal ones are kept once


class Was:
    """A Parameter before it was replaced or cast; it keeps no values. A tied one has the same Was in all its places."""

    def __init__(self, parameter: nn.Parameter):
        self.dtype, self.requires_grad = parameter.dtype, parameter.requires_grad
        self._attributes = dict(vars(parameter))
        self._ref: Any = TensorWeakRef(parameter)
        self._again: nn.Parameter | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_ref": None, "_again": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Was:
        made = memo[id(self)] = object.__new__(Was)
        vars(made).update(copy.deepcopy(self.__getstate__(), memo))
        if self.alive is not None and (copied := memo.get(id(self.alive))) is not None:
            made._ref = TensorWeakRef(copied)
        return made

    @property
    def alive(self) -> nn.Parameter | None:
        """The Parameter itself, if anyone holds it."""
        return None if self._ref is None else self._ref()

    def loses(self, value: Tensor) -> bool:
        """Whether values of this dtype have been rounded from those that the Parameter had."""
        return torch.promote_types(value.dtype, self.dtype) != value.dtype

    def as_it_is(self, device: torch.device) -> nn.Parameter | None:
        """The Parameter with the values that it has, moved to `device`, if anyone holds it."""
        parameter = self.alive
        if self._again is None and parameter is not None and parameter.dtype == self.dtype and not parameter.is_meta:
            if parameter.device != device:
                parameter.data = parameter.data.to(device)
            self._again = parameter
        return self._again

    def with_values(self, value: Tensor) -> nn.Parameter:
        """The Parameter with these values, in its own dtype: the same object if anyone holds it, else a new one."""
        if self._again is None:
            value = _own_memory(value.detach().to(self.dtype))
            parameter = self.alive
            if parameter is not None and torch._has_compatible_shallow_copy_type(parameter, value):
                parameter.data = value
            else:
                parameter = nn.Parameter(value, requires_grad=self.requires_grad)
                vars(parameter).update(self._attributes)
            self._again = parameter
        return self._again

    def release(self) -> None:
        """Let go of the Parameter that `as_it_is` or `with_values` returned: the model has it."""
        self._again = None


class Tensors:
    """The parameters and buffers of a model before any is replaced or cast. Keeps neither modules nor parameters."""

    def __init__(self, model: nn.Module):
        self.tables: list[Tensor] = []  # large buffers of skeletons, which share equal ones, as masks of layers are
        self._was: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._places: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._parameters: WeakKeyDictionary[nn.Module, dict[str, Was]] = WeakKeyDictionary()
        self._buffers: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()
        for module in model.modules():
            held = {leaf: p for leaf, p in module._parameters.items() if p is not None}
            for leaf, parameter in held.items():
                if parameter not in self._was:
                    self._was[parameter], self._places[parameter] = Was(parameter), []
                self._places[parameter].append((ref(module), leaf))
            self._parameters[module] = {leaf: self._was[parameter] for leaf, parameter in held.items()}
            self._buffers[module] = {leaf: buffer for leaf, buffer in module._buffers.items() if buffer is not None}

    def was(self, module: nn.Module) -> Mapping[str, Was]:
        """The module's own parameters, by their names in it."""
        return self._parameters.get(module, {})

    def buffers(self, module: nn.Module) -> Mapping[str, Tensor]:
        """The module's own buffers, by their names in it."""
        return self._buffers.get(module, {})

    def cast(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        """Put the parameter in `dtype` in all places of the model that have it.

        In another dtype it is a new Parameter, so that whoever holds the old one keeps its values. It keeps
        `requires_grad`: without, PyTorch's linear copies the whole weight for a strided x (2 s for an lm_head).
        """
        if parameter.dtype == dtype:
            parameter.data = memory.copied(parameter.data, dtype)  # on large pages
            return
        cast = nn.Parameter(memory.copied(parameter.detach(), dtype), requires_grad=parameter.requires_grad)
        vars(cast).update(vars(parameter))
        self._places[cast] = self._places[parameter]
        for place, leaf in self._places[parameter]:
            module = place()
            if module is not None and module._parameters.get(leaf) is parameter:
                module._parameters[leaf] = cast

    def casts(self, model: nn.Module) -> Iterator[tuple[nn.Module, str, Was | Tensor]]:
        """Yield the parameters and buffers that were cast, as modules that are still in the model had them."""
        for module in model.modules():
            for leaf, was in self._parameters.get(module, {}).items():
                now: Any = module._parameters.get(leaf)
                if now is not None and now.dtype != was.dtype:
                    yield module, leaf, was
            for leaf, buffer in self._buffers.get(module, {}).items():
                now = module._buffers.get(leaf)
                if now is not None and now.dtype != buffer.dtype:
                    yield module, leaf, buffer


class Skeleton:
    """A module that was replaced, without the parameters `sources`, which its replacement has in another form.

    `buffers`: its buffers among these. They are small, and kept.
    """

    def __init__(self, module: nn.Module, tensors: Tensors, sources: Collection[str]):
        clones: dict[int, nn.Module] = {}
        self._nodes: list[tuple[str, ReferenceType[nn.Module] | None, nn.Module]] = []
        self.parameters: dict[str, Was] = {}
        self.buffers: dict[str, Tensor] = {}
        for path, part in module.named_modules(remove_duplicate=False):
            left = {leaf for leaf in (*part._parameters, *part._buffers) if named(path, leaf) in sources}
            self.parameters |= {named(path, leaf): was for leaf, was in tensors.was(part).items() if leaf in left}
            self.buffers |= {named(path, leaf): held for leaf, held in tensors.buffers(part).items() if leaf in left}
            if id(part) not in clones:
                clones[id(part)] = _without(part, left, tensors.tables)
            self._nodes.append((path, ref(part), clones[id(part)]))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_nodes": [(path, None, clone) for path, _, clone in self._nodes]}

    def __deepcopy__(self, memo: dict[int, Any]) -> Skeleton:
        made = memo[id(self)] = object.__new__(Skeleton)
        vars(made).update(copy.deepcopy(self.__getstate__(), memo))
        return made

    @property
    def paths(self) -> set[str]:
        """The paths of the modules in it, the module's own "" among them."""
        return {path for path, *_ in self._nodes}

    def rebuilt(self, parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]) -> nn.Module:
        """The module with these tensors, by their names in it: the very modules that anyone holds, else new ones."""
        modules: dict[str, nn.Module] = {}
        for path, held, clone in self._nodes:
            module = None if held is None else held()
            modules[path] = module if module is not None else _with_own_tables(clone)
            if path:
                owner, _, leaf = path.rpartition(".")
                modules[owner]._modules[leaf] = modules[path]
        for name, parameter in parameters.items():
            owner, _, leaf = name.rpartition(".")
            modules[owner]._parameters[leaf] = parameter
        for name, buffer in buffers.items():
            owner, _, leaf = name.rpartition(".")
            modules[owner]._buffers[leaf] = buffer
        return modules[""]


def _without(module: nn.Module, left: Collection[str], tables: list[Tensor]) -> nn.Module:
    """A copy of the module alone, without these tensors. Its hooks are the same dicts, which its replacement has."""
    clone: nn.Module = object.__new__(type(module))
    vars(clone).update(vars(module))
    clone._modules = dict.fromkeys(module._modules)
    clone._parameters = {leaf: None if leaf in left else held for leaf, held in module._parameters.items()}
    clone._buffers = {
        leaf: None if leaf in left or held is None else _shared(held, tables) for leaf, held in module._buffers.items()
    }
    return clone


def _shared(buffer: Tensor, tables: list[Tensor]) -> Tensor:
    if buffer.nbytes < _LARGE or type(buffer) is not Tensor:
        return buffer
    for table in tables:
        alike = table.shape == buffer.shape and table.dtype == buffer.dtype and table.device == buffer.device
        if alike and torch.equal(table, buffer):
            return table
    tables.append(buffer)
    return buffer


def _with_own_tables(clone: nn.Module) -> nn.Module:
    for leaf, buffer in clone._buffers.items():
        if buffer is not None and buffer.nbytes >= _LARGE:
            clone._buffers[leaf] = buffer.clone()
    return clone


def _own_memory(value: Tensor) -> Tensor:
    """`value`, or a copy if it is not laid out as PyTorch would."""
    plain = value.is_contiguous() or (value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last))
    if value.is_meta or (plain and is_aligned(value)):
        return value
    return value.clone(memory_format=torch.preserve_format if plain else torch.contiguous_format)


def is_aligned(value: Tensor) -> bool:
    """Whether the memory begins where PyTorch might begin some."""
    return value.data_ptr() % _ALIGNED == 0
