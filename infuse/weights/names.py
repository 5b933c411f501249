"""Naming: how the names in a checkpoint become the names of a model, as transformers does it when it loads.

Prefixes and renamed parts are resolved with transformers' own tables, if it has any for the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn


def held(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and persistent buffers by every name; tied ones have several."""
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}


def placed(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and persistent buffers by path. (The state dict of a replaced model uses the original's names.)"""
    tensors: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and leaf not in module._non_persistent_buffers_set:
                tensors[f"{path}.{leaf}" if path else leaf] = tensor
    return tensors


@dataclass(frozen=True)
class Converter:
    """One of transformers' converters, as it applies to a tensor of a checkpoint.

    `pattern` is the one of its source patterns that matches the tensor's name, `targets` are the names that its first
    result may have in the model. `stacks`: it only stacks and concatenates; the pattern is then at `place`.
    """

    converter: Any
    pattern: str
    targets: tuple[str, ...]
    stacks: bool

    @property
    def place(self) -> int:
        return self.converter.source_patterns.index(self.pattern)


class Naming:
    """The names that tensors of a checkpoint have in `model`. `base_prefix`: of the model without its head."""

    def __init__(self, model: nn.Module):
        self._model: Any = model
        self._knows_transformers = hasattr(model, "base_model_prefix")
        self.base_prefix: str = getattr(model, "base_model_prefix", "")

    def variants(self, name: str) -> Iterator[str]:
        """Yield the names that a tensor of the checkpoint may have in the model, the likeliest first."""
        return self._with_prefixes(self._renamed(name, converters=[])[0])

    def converter(self, name: str) -> Converter | None:
        """The converter of transformers that takes the tensor `name` of the checkpoint; None if there is none."""
        if not self._knows_transformers:
            return None
        renamings, converters = self._tables
        target, pattern = self._renamed(name, converters)
        if pattern is None:
            return None
        last = {pattern: one for one in converters for pattern in one.source_patterns}[pattern]
        return Converter(last, pattern, tuple(self._with_prefixes(target)), _stacks(last))

    @cached_property
    def _tables(self) -> tuple[list[Any], list[Any]]:
        """Transformers' renamings and converters for the model."""
        if not self._knows_transformers:
            return [], []
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        table = get_model_conversion_mapping(self._model)
        renamings = [one for one in table if isinstance(one, WeightRenaming)]
        return renamings, [one for one in table if isinstance(one, WeightConverter)]

    def _renamed(self, name: str, converters: list[Any]) -> tuple[str, str | None]:
        """The name after transformers' renaming, and the pattern of one of the `converters` that it matches."""
        if not self._knows_transformers:
            return name, None
        from transformers.core_model_loading import rename_source_key

        return rename_source_key(name, self._tables[0], converters)

    def _with_prefixes(self, name: str) -> Iterator[str]:
        """Yield the name with and without wrapper prefixes: `module.` (parallel training) and the base model's."""
        for bare in (name, name.removeprefix("module.")):
            yield bare
            if self.base_prefix:
                yield f"{self.base_prefix}.{bare}"
                yield bare.removeprefix(f"{self.base_prefix}.")


def _stacks(converter: Any) -> bool:
    """True if a converter stacks tensors, and concatenates stacks along their rows, and does nothing else."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    steps = [(type(operation), getattr(operation, "dim", 0)) for operation in converter.operations]
    return steps in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])
