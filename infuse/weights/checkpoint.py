"""A checkpoint's tensors by name, whatever its files: whole ones, or pieces that ranks saved, merged as they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from infuse.errors import CheckpointError
from infuse.weights.pieces import Layout, Packed, Shape, layout
from infuse.weights.reader import Part, Stored
from infuse.weights.safetensors_file import SafetensorsFile
from infuse.weights.sources import Files
from infuse.weights.torch_file import TorchFile


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
class Pieces:
    """One tensor: a file for each rank that has a piece of it."""

    name: str
    files: tuple[TensorFile, ...]

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(file.stored[self.name].shape for file in self.files)

    @property
    def dtype(self) -> torch.dtype:
        return self.files[0].stored[self.name].dtype

    def read(self, whole: Shape, found: Layout, part: Part) -> Tensor:
        """The tensor of shape `whole`, or that part of it, from the pieces that it touches."""
        if len(self.files) == 1 or (len(found.runs) == 1 and self.shapes[0] == whole):
            return self.files[0].read(self.name, part)
        cuts = [*part, *(slice(None) for _ in whole[len(part) :])]
        start, stop, _ = cuts[found.axis].indices(whole[found.axis])
        parts = []
        for run in found.part(start, stop):
            cuts[found.axis] = slice(run.start, run.stop)
            parts.append(self.files[run.rank].read(self.name, tuple(cuts)))
        if not parts:
            cuts[found.axis] = slice(0, 0)
            return self.files[0].read(self.name, tuple(cuts))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=found.axis)


class Checkpoint:
    """All files of a checkpoint, open, with their headers read and judged. Values come when they are asked for."""

    def __init__(self, files: Files):
        self.form, self.version = files.form, files.version
        opened = {path: open_file(path) for path in dict.fromkeys(files)}
        groups = [tuple(opened[path] for path in group) for group in files.groups]
        if len(groups) > 1 and all(len(g) == 1 and g[0].stored.keys() == groups[0][0].stored.keys() for g in groups):
            groups = [tuple(file for group in groups for file in group)]  # the same names in each file: pieces of ranks
        self.files: tuple[TensorFile, ...] = tuple(opened.values())
        self.pieces: dict[str, Pieces] = {}
        for group in groups:
            for name in dict.fromkeys(name for file in group for name in file.stored):
                self.pieces.setdefault(name, Pieces(name, tuple(file for file in group if name in file.stored)))
        if not self.pieces:
            raise CheckpointError(f"{files.form}: holds no tensors: {', '.join(str(path) for path in opened)}")

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_read for file in self.files)

    def layout(self, name: str, wanted: Shape, packed: Packed | None) -> Layout | None:
        """How the pieces of `name` make up `wanted`, None where they do not."""
        pieces = self.pieces[name]
        if self.version is not None and packed is None and ".query_key_value." in name and self.version < 1:
            packed = Packed((max(wanted, default=0) // 3,) * 3)  # Megatron before 1.0: [q | k | v]; since then by heads
        return layout(pieces.shapes, wanted, packed)


def open_file(path: Path) -> TensorFile:
    """The file in its format, its header read."""
    return SafetensorsFile(path) if path.suffix == ".safetensors" else TorchFile(path)


def in_words(pieces: Sequence[Shape]) -> str:
    """The shapes of pieces for an error text."""
    return str(pieces[0]) if len(pieces) == 1 else f"{len(pieces)} pieces of {', '.join(str(shape) for shape in dict.fromkeys(pieces))}"
