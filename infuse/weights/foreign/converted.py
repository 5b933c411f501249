"""Model tensors that transformers' converters compute from checkpoint tensors: transposed, split, interleaved, chunked.

merged.py handles plain stacking and concatenation, and reads slices. The converters here need whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from infuse.ground.errors import in_brief
from infuse.weights.foreign.layout import Recognised, Unread
from infuse.weights.foreign.merged import numbers_in
from infuse.weights.lazy import Composite, LazyTensor, Shape, Slices


@dataclass(frozen=True)
class Conversion:
    """A transformers weight converter with its source tensors by pattern. `target`: name of its first result."""

    converter: Any
    sources: Mapping[str, Sequence[LazyTensor]]
    target: str
    model: Any

    def results(self, read: Callable[[LazyTensor], Tensor]) -> dict[str, Tensor]:
        """Run the conversion and return its results by model name."""
        values: Any = {pattern: [read(tensor) for tensor in tensors] for pattern, tensors in self.sources.items()}
        converter = self.converter
        for operation in converter.operations:
            values = operation.convert(
                values,
                source_patterns=converter.source_patterns,
                target_patterns=converter.target_patterns,
                full_layer_name=self.target,
                model=self.model,
                config=self.model.config,
                missing_keys=None,
            )
        whole = {pattern: value[0] if isinstance(value, list) else value for pattern, value in values.items()}
        prefix, _, suffix = next(self.target.partition(pattern) for pattern in whole if pattern in self.target)
        return {f"{prefix}{pattern}{suffix}": value for pattern, value in whole.items()}


@dataclass
class _Last:
    """Cache of the last conversion's results, because a tensor is read in many parts."""

    of: Conversion | None = None
    results: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Converted(Composite):
    """One result of a conversion."""

    name: str
    conversion: Conversion
    shape: Shape
    dtype: torch.dtype
    last: _Last

    coded = None

    @property
    def made_of(self) -> Iterable[LazyTensor]:
        return [tensor for tensors in self.conversion.sources.values() for tensor in tensors]

    def read(self, part: Slices = ()) -> Tensor:
        """Return the result or a part of it. The first read runs the conversion and caches its results."""
        if self.last.of is not self.conversion:
            self.last.results = {}  # free the memory before it is needed
            self.last.results = self.conversion.results(lambda source: source.read())
            self.last.of = self.conversion
        tensor = self.last.results[self.name]
        return tensor[part] if part else tensor


def converted(unread: Unread) -> Recognised:
    """Recognise tensors that transformers' converters compute from whole checkpoint tensors.

    Candidates are checkpoint tensors whose name the model lacks, or whose shape differs from the model's.
    """
    if unread.checkpoint.in_pieces:
        return Recognised()
    unlike = [
        stored
        for name, stored in unread.by_name.items()
        if unread.shapes.get(name) not in (None, *unread.checkpoint.pieces[stored].shapes)
    ]
    tensors: dict[str, LazyTensor] = {}
    used: set[str] = set()
    faults: dict[str, str] = {}
    last = _Last()
    for conversion, members in _conversions(unread, (*unread.names, *unlike)):
        used |= members
        try:
            results = conversion.results(lambda source: torch.empty(source.shape, dtype=source.dtype, device="meta"))
        except Exception as error:  # transformers' operations may raise anything
            sources = ", ".join(sorted(members))
            faults[conversion.target] = f"transformers cannot make it from {sources} ({in_brief(error)})"
            continue
        shapes = {name: tuple(value.shape) for name, value in results.items()}
        others = {name: shape for name, shape in shapes.items() if unread.shapes.get(name) != shape}
        for name, shape in others.items():
            faults[name] = f"converted to {shape}, the model has {unread.shapes.get(name)}"
        if not others:
            for name, value in results.items():
                tensors[name] = Converted(name, conversion, shapes[name], value.dtype, last)
    return Recognised(tensors, used, faults)


def _conversions(unread: Unread, names: Iterable[str]) -> Iterator[tuple[Conversion, set[str]]]:
    """Yield the conversions that apply to these checkpoint tensors, each with the names it consumes."""
    members: dict[tuple[int, str], dict[str, list[str]]] = {}
    converters: dict[tuple[int, str], Any] = {}
    for name in names:
        converter = unread.naming.converter(name)
        targets = [] if converter is None else [target for target in converter.targets if target in unread.shapes]
        if converter is not None and targets:
            key = id(converter.converter), targets[0]
            converters[key] = converter.converter
            members.setdefault(key, {}).setdefault(converter.pattern, []).append(name)
    for key, by_pattern in members.items():
        sources = {
            pattern: [unread.whole(name) for name in sorted(names, key=numbers_in)]
            for pattern, names in by_pattern.items()
        }
        every = {name for names in by_pattern.values() for name in names}
        yield Conversion(converters[key], sources, key[1], unread.model), every
