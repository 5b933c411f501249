"""Tensors of a model that transformers computes from those of a checkpoint: transposed, split, interleaved, dealt out.

What is only stacked and concatenated is in merged.py, which reads slices; these are made from whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from infuse.errors import in_brief
from infuse.weights.checkpoint import Checkpoint, Joined
from infuse.weights.merged import numbers_in
from infuse.weights.pieces import Shape
from infuse.weights.reader import Slices
from infuse.weights.saved_shards import SavedShards


@dataclass(frozen=True)
class Conversion:
    """One of transformers' converters and the tensors that it takes, by their patterns. `target`: its first result."""

    converter: Any
    sources: Mapping[str, Sequence[Joined]]
    target: str
    model: Any

    def results(self, read: Callable[[Joined], Tensor]) -> dict[str, Tensor]:
        """All results by their names in the model."""
        given: Any = {pattern: [read(one) for one in joined] for pattern, joined in self.sources.items()}
        own = self.converter
        for operation in own.operations:
            given = operation.convert(
                given, source_patterns=own.source_patterns, target_patterns=own.target_patterns,
                full_layer_name=self.target, model=self.model, config=self.model.config, missing_keys=None,
            )  # fmt: skip
        whole = {pattern: value[0] if isinstance(value, list) else value for pattern, value in given.items()}
        prefix, _, suffix = next(self.target.partition(pattern) for pattern in whole if pattern in self.target)
        return {f"{prefix}{pattern}{suffix}": value for pattern, value in whole.items()}


@dataclass
class _Last:
    """The results of the last conversion that was read: a tensor is read in many parts."""

    of: Conversion | None = None
    results: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Converted:
    """One result of a conversion."""

    name: str
    conversion: Conversion
    shape: Shape
    dtype: torch.dtype
    last: _Last

    def read(self, part: Slices = ()) -> Tensor:
        """Read the tensor, or `part` of it. All sources of the conversion are read, and its results kept."""
        if self.last.of is not self.conversion:
            self.last.results = {}  # free the memory before it is needed
            self.last.results = self.conversion.results(lambda joined: joined.read())
            self.last.of = self.conversion
        found = self.last.results[self.name]
        return found[part] if part else found


def converted(
    model: Any,
    checkpoint: Checkpoint | SavedShards,
    names: Iterable[str],
    place: Callable[[str], tuple[Any, str, str] | None],
    wanted: Mapping[str, Shape],
) -> tuple[dict[str, Converted], set[str], list[str]]:
    """The tensors of `wanted` shapes that are converted from `names`, the names that are used, and what does not fit.

    `place` maps a name to its converter, the pattern that it matches, and the converter's first result.
    """
    grouped: dict[tuple[int, str], dict[str, list[str]]] = {}
    converters: dict[tuple[int, str], Any] = {}
    for name in names:
        found = place(name)
        if found is not None:
            converter, pattern, target = found
            key = id(converter), target
            converters[key] = converter
            grouped.setdefault(key, {}).setdefault(pattern, []).append(name)
    made: dict[str, Converted] = {}
    used: set[str] = set()
    misshaped: list[str] = []
    last = _Last()
    for key, by_pattern in grouped.items():
        members = {pattern: sorted(one, key=numbers_in) for pattern, one in by_pattern.items()}
        joined = {pattern: [_whole(checkpoint, name) for name in one] for pattern, one in members.items()}
        own = {name for one in members.values() for name in one}
        if any(one is None for held in joined.values() for one in held):
            continue  # ranks saved pieces of it
        conversion = Conversion(converters[key], joined, key[1], model)  # type: ignore[arg-type]
        try:
            results = conversion.results(lambda one: torch.empty(one.shape, dtype=one.dtype, device="meta"))
        except Exception as error:  # transformers' operations check what they are given in their own ways
            misshaped.append(f"{key[1]}: transformers cannot make it from {', '.join(sorted(own))} ({in_brief(error)})")
            used |= own
            continue
        unlike = {name: tuple(value.shape) for name, value in results.items() if wanted.get(name) != value.shape}
        misshaped += [
            f"{name}: converted to {shape}, the model has {wanted.get(name)}" for name, shape in unlike.items()
        ]
        used |= own
        if not unlike:
            made |= {
                name: Converted(name, conversion, tuple(value.shape), value.dtype, last)
                for name, value in results.items()
            }
    return made, used, misshaped


def _whole(checkpoint: Checkpoint | SavedShards, name: str) -> Joined | None:
    """The tensor as it is stored; None if it is in pieces."""
    shapes = set(checkpoint.pieces[name].shapes)
    return checkpoint.joined(name, shapes.pop(), None) if len(shapes) == 1 else None
