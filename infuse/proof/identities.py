"""The identity of a proof: a digest of everything that its result depends on.

That is our code and kernels, the code of the model's classes, its config and attributes, the plan, the versions and the
machine, and the values of the module that is proven. A proof without an identity runs each time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from infuse import architectures
from infuse.config.inference import InferenceConfig
from infuse.ground.identity import Code, Unknown, checksum, digest, of_infuse, of_machine, sum_of
from infuse.layers import parts
from infuse.plan.digest import digest_of
from infuse.plan.found import traits
from infuse.plan.plan import Plan
from infuse.plan.step import Step
from infuse.quant import parse
from infuse.reading.calls import attention_function
from infuse.weights import foreign
from infuse.weights.lazy import LazyTensor, Lookup
from infuse.weights.loader import PART_VALUES, LayerSource

_OF_MODULES = frozenset({"_parameters", "_buffers", "_modules", "training"})


def are_complete() -> bool:
    """Whether all code that a proof runs is infuse's, PyTorch's, transformers' or the model's: what is registered from
    outside (specs, parts, formats, layouts of checkpoints) is not looked at.
    """
    return not any(registry.is_extended() for registry in (architectures, parts, parse, foreign))


class Identities:
    """Identities of the proofs of one plan's steps. Each asks the model as it is at that moment."""

    def __init__(self, plan: Plan, model: nn.Module, config: InferenceConfig, source: LayerSource):
        self._model, self._source = model, source
        self._code = Code()
        settings = (plan.digest(), str(plan.dtype), config.verify, config.kv_cache, source.is_live)
        self._around = digest(of_machine(source.device), of_infuse(), settings, self._of_model())

    def of(self, step: Step) -> str:
        """The identity of a step's proof, 64 hexadecimal digits. Unknown names what has none."""
        module = self._model.get_submodule(step.path)
        for inner in module.modules():
            self._attributes(inner)  # raises Unknown where the model's text has only an attribute's class
        alike = self._code(traits(self._model, step.path, is_called=step.is_called))
        values = list(self._values(step.path, module))
        return digest(self._around, step.path, digest_of(step.likeness), alike, values)

    def _of_model(self) -> tuple:
        """All modules with their classes and those of their attributes that have a text, configs too; attention."""
        model: Any = self._model
        modules = [(path, type(module).__qualname__) for path, module in model.named_modules()]
        classes = [self._code.of_class(cls) for cls in dict.fromkeys(type(module) for module in model.modules())]
        attributes = [self._attributes(module, lenient=True) for module in model.modules()]
        configs = {id(one): one for one in (vars(module).get("config") for module in model.modules())}
        attention = [self._code(attention_function(config)) for config in configs.values()]
        return modules, classes, attributes, attention

    def _attributes(self, module: nn.Module, lenient: bool = False) -> list[tuple[str, Any]]:
        named = ((name, value) for name, value in sorted(vars(module).items()) if name not in _OF_MODULES)
        return [(name, self._code.or_class(value) if lenient else self._code(value)) for name, value in named]

    def _values(self, path: str, module: nn.Module) -> Iterator[tuple]:
        """Shapes, dtypes and checksums of all tensors of a module: of its own, or of the checkpoint's."""
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if not self._source.is_live and tensor.is_meta:
                yield name, *_of_stored(self._source.tensors(path), name)
            else:
                yield name, *checksum(tensor)


def _of_stored(tensors: Lookup, name: str) -> tuple:
    """Describe a tensor of a checkpoint in the form in which it is stored."""
    try:
        tensor = tensors(name)
    except KeyError:
        raise Unknown(f"{name}, which the checkpoint has not under this name") from None
    if tensor.coded is None:
        return tuple(_sums({name: tensor}))
    coded = tensor.coded
    order = None if coded.order is None else coded.order.digest
    return coded.format, order, _sums(coded.buffers)


def _sums(tensors: Mapping[str, LazyTensor]) -> list[tuple]:
    """Shape, dtype and CRC-32 of each tensor. They are read side by side in parts of rows, so that no large one is in
    memory whole, and that a conversion which gives several at once runs once.
    """
    sums = dict.fromkeys(sorted(tensors), 0)
    for part in _parts([tensor.shape for tensor in tensors.values()]):
        for name in sums:
            sums[name] = sum_of(tensors[name].read(part), sums[name])
    return [(name, tuple(tensors[name].shape), str(tensors[name].dtype), value) for name, value in sums.items()]


def _parts(shapes: Sequence[tuple[int, ...]]) -> list[tuple[slice, ...]]:
    """Slices of rows of about PART_VALUES values of the largest of these; one part if not all have the same rows."""
    rows = {shape[0] if shape else None for shape in shapes}
    count = rows.pop()
    if rows or not count:
        return [()]
    step = max(1, PART_VALUES * count // max(math.prod(shape) for shape in shapes))
    return [(slice(start, min(start + step, count)),) for start in range(0, count, step)]
