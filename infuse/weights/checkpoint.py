"""A checkpoint's tensors by name, whatever its files: whole ones, or pieces that ranks saved, merged as they are read.

A name has one value: that of the file that the index names, or the same one in every file that holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from infuse.errors import CheckpointError
from infuse.parallel.slices import Range, Span, Tiling, taken
from infuse.weights.pieces import Packed, Shape, tiling
from infuse.weights.reader import Part, Stored
from infuse.weights.safetensors_file import SafetensorsFile
from infuse.weights.sources import Files
from infuse.weights.torch_file import TorchFile

_COMPARED_ROWS = 4096  # of two copies of a tensor: compared in parts


class TensorFile(Protocol):
    """One open file of tensors."""

    @property
    def path(self) -> Path: ...
    @property
    def bytes_read(self) -> int: ...
    @property
    def stored(self) -> dict[str, Stored]: ...
    def read(self, name: str, part: Part = ()) -> Tensor: ...


@dataclass(frozen=True)
class Joined:
    """One tensor, put together from what ranks' files have of it. `spans` are of the tiling's positions.

    A file may store fewer columns than there are positions: codes that share a byte, a scale for a group of inputs.
    """

    name: str
    files: Mapping[int, TensorFile]
    tiling: Tiling
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, name: str, files: Mapping[int, TensorFile], tiling: Tiling, first: int = 0) -> Joined:
        """The tensor; of files that have the same, `first` is read."""
        return cls(name, files, tiling, tiling.spans(first))

    @property
    def shape(self) -> Shape:
        """The whole tensor's."""
        stored = next(iter(self.files.values())).stored[self.name].shape
        axis = self.tiling.axis
        return (*stored[:axis], self.tiling.length, *stored[axis + 1 :]) if stored else ()

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.files.values())).stored[self.name].dtype

    def read(self, part: Part = ()) -> Tensor:
        """The tensor or that part of it, from the files that have it."""
        if len(self.spans) == 1 and self.spans[0].length == self.tiling.length:
            return self.files[self.spans[0].source].read(self.name, part)
        axis = self.tiling.axis
        slices = [*part, *(slice(None) for _ in range(axis + 1 - len(part)))]
        start, stop, _ = slices[axis].indices(self.tiling.length)
        return self.ranges([(start, stop)], slices)

    def ranges(self, ranges: Iterable[Range], slices: Sequence[slice] = ()) -> Tensor:
        """Those positions side by side; `slices` are of all axes, of which the tiling's own is not looked at."""
        axis = self.tiling.axis
        slices = [*slices, *(slice(None) for _ in range(axis + 1 - len(slices)))]
        found = []
        for span in taken(self.spans, ranges) or [Span(self.spans[0].source if self.spans else 0, 0, 0)]:
            slices[axis] = self._columns(span)
            found.append(self.files[span.source].read(self.name, tuple(slices)))
        return found[0] if len(found) == 1 else torch.cat(found, dim=axis)

    def _columns(self, span: Span) -> slice:
        """Where a span lies in its file. A scale that stands for all of a row is there for each part of the row."""
        stored = self.files[span.source].stored[self.name].shape[self.tiling.axis]
        length = self.tiling.part_length(span.source)
        if stored == 1 < length:
            return slice(0, 1)
        return slice(span.start * stored // length, span.stop * stored // length) if length else slice(0, 0)


@dataclass(frozen=True)
class Pieces:
    """One tensor of a checkpoint: a file for each rank that has a piece of it."""

    name: str
    files: tuple[TensorFile, ...]

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(file.stored[self.name].shape for file in self.files)

    @property
    def dtype(self) -> torch.dtype:
        return self.files[0].stored[self.name].dtype

    def equals(self, other: Pieces) -> bool:
        """Whether these are the same values in the same dtype, file by file."""
        pairs = zip(self.files, other.files, strict=False)
        return len(self.files) == len(other.files) and all(
            one is two or _same_values(self.name, one, two) for one, two in pairs
        )

    def are_copies(self, whole: Shape) -> bool:
        """Whether the tensor of shape `whole` has the same values in every file that holds all of it."""
        first, *others = [file for file in self.files if file.stored[self.name].shape == whole] or self.files[:1]
        return all(_same_values(self.name, first, other) for other in others)

    def joined(self, wanted: Shape, packed: Packed | None) -> Joined | None:
        """The tensor of shape `wanted` that the pieces make up, None where they do not."""
        found = tiling(self.shapes, wanted, packed)
        return None if found is None else Joined.of(self.name, dict(enumerate(self.files)), found)


class StoredTensor(Protocol):
    """What is known of one tensor of a checkpoint before it is read."""

    @property
    def shapes(self) -> tuple[Shape, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def are_copies(self, whole: Shape) -> bool: ...


class TensorSource(Protocol):
    """A checkpoint, whatever its files. `told`: that ranks saved pieces is said of it, else it is seen from the names.

    `in_pieces`: how a tensor lies in several files goes by its shape. `holds_replaced`: the tensors are those of
    replaced layers.
    """

    form: str
    told: bool
    in_pieces: bool
    holds_replaced: bool

    @property
    def pieces(self) -> Mapping[str, StoredTensor]: ...
    def joined(self, name: str, wanted: Shape, packed: Packed | None) -> Joined | None:
        """The tensor `name` of shape `wanted`, None where what is stored does not make one up."""


class Checkpoint:
    """All files of a checkpoint, open, with their headers read and judged. Values come when they are asked for."""

    holds_replaced = False

    def __init__(self, files: Files):
        self.form, self._version = files.form, files.version
        opened = {path: open_file(path) for path in dict.fromkeys(files)}
        groups = [tuple(opened[path] for path in group) for group in files.groups]
        self.told = any(len(group) > 1 for group in groups)
        if (
            not files.where
            and len(groups) > 1
            and all(len(g) == 1 and g[0].stored.keys() == groups[0][0].stored.keys() for g in groups)
        ):
            groups = [tuple(file for group in groups for file in group)]  # the same names in each file: pieces of ranks
        self.files: tuple[TensorFile, ...] = tuple(opened.values())
        self.pieces = {name: Pieces(name, (opened[path],)) for name, path in files.where.items()}
        if absent := [f"{name} in {path}" for name, path in files.where.items() if name not in opened[path].stored]:
            raise CheckpointError(
                f"{files.form}: {len(absent)} tensors are not in the files that the index names: {', '.join(absent)}"
            )
        differing = []
        for group in groups:
            for name in dict.fromkeys(name for file in group for name in file.stored):
                found = Pieces(name, tuple(file for file in group if name in file.stored))
                kept = self.pieces.setdefault(name, found)
                if name not in files.where and not kept.equals(found):
                    differing.append(f"{name} in {kept.files[0].path} and {found.files[0].path}")
        if differing:
            raise CheckpointError(
                f"{files.form}: {len(differing)} tensors have other values in another file: {'; '.join(differing)}; "
                "give the files of one checkpoint"
            )
        if not self.pieces:
            raise CheckpointError(f"{files.form}: holds no tensors: {', '.join(str(path) for path in opened)}")
        self.in_pieces = any(len(one.files) > 1 for one in self.pieces.values())

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_read for file in self.files)

    def joined(self, name: str, wanted: Shape, packed: Packed | None) -> Joined | None:
        if self._version is not None and packed is None and ".query_key_value." in name and self._version < 1:
            packed = Packed((max(wanted, default=0) // 3,) * 3)  # Megatron before 1.0: [q | k | v]; since then by heads
        return self.pieces[name].joined(wanted, packed)


def open_file(path: Path) -> TensorFile:
    """The file in its format, its header read."""
    return SafetensorsFile(path) if path.suffix == ".safetensors" else TorchFile(path)


def _same_values(name: str, one: TensorFile, other: TensorFile) -> bool:
    """Whether two files hold the same bytes of that name, read in parts."""
    if one.stored[name] != other.stored[name]:
        return False
    shape = one.stored[name].shape
    parts: list[Part] = [
        (slice(i, i + _COMPARED_ROWS),) for i in range(0, shape[0] if shape else 0, _COMPARED_ROWS)
    ] or [()]
    values = ([file.read(name, part).reshape(-1).view(torch.uint8) for file in (one, other)] for part in parts)
    return all(torch.equal(*both) for both in values)


def in_words(pieces: Sequence[Shape]) -> str:
    """The shapes of pieces for an error text."""
    return (
        str(pieces[0])
        if len(pieces) == 1
        else f"{len(pieces)} pieces of {', '.join(str(shape) for shape in dict.fromkeys(pieces))}"
    )
