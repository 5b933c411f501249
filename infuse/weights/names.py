"""Naming: map checkpoint names to model names, as transformers does when loading.

Prefixes and renamed parts are resolved with transformers' own tables, if it has any for the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn


def held(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and persistent buffers; tied ones appear under each of their names."""
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
    """A transformers weight converter, matched to one checkpoint tensor.

    `pattern`: the source pattern that matches the tensor's name, at index `place`. `targets`: possible model names of
    the first result. `stacks`: the converter only stacks and concatenates.
    """

    converter: Any
    pattern: str
    targets: tuple[str, ...]
    stacks: bool

    @property
    def place(self) -> int:
        return self.converter.source_patterns.index(self.pattern)


class Naming:
    """Maps checkpoint names to names in `model`. `base_prefix`: prefix of the model without its head."""

    def __init__(self, model: nn.Module):
        self._model: Any = model
        self._knows_transformers = hasattr(model, "base_model_prefix")
        self.base_prefix: str = getattr(model, "base_model_prefix", "")

    def variants(self, name: str) -> Iterator[str]:
        """Yield the names that a tensor of the checkpoint may have in the model, the likeliest first."""
        return self._with_prefixes(self._renamed(name, converters=[])[0])

    def converter(self, name: str) -> Converter | None:
        """Return the transformers converter that takes the checkpoint tensor `name`; None if there is none."""
        if not self._knows_transformers:
            return None
        renamings, converters = self._tables
        target, pattern = self._renamed(name, converters)
        if pattern is None:
            return None
        last = {pattern: converter for converter in converters for pattern in converter.source_patterns}[pattern]
        return Converter(last, pattern, tuple(self._with_prefixes(target)), _stacks(last))

    @cached_property
    def _tables(self) -> tuple[list[Any], list[Any]]:
        """Transformers' renamings and converters for the model."""
        if not self._knows_transformers:
            return [], []
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        table = get_model_conversion_mapping(self._model)
        renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
        return renamings, [entry for entry in table if isinstance(entry, WeightConverter)]

    def _renamed(self, name: str, converters: list[Any]) -> tuple[str, str | None]:
        """Apply transformers' renamings; return the new name and the pattern of the `converters` that it matches."""
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
