"""Look up the tensors of a checkpoint by name, merging the pieces that ranks saved.

Each name has one value: the one from the file that the index names, or the same value in every file that holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from infuse.errors import CheckpointError
from infuse.weights.lazy import FileTensor, Joined, LazyTensor, Shape, Slices
from infuse.weights.pieces import Packed, tiling
from infuse.weights.safetensors_file import SafetensorsFile
from infuse.weights.sources import Files
from infuse.weights.torch_file import TorchFile

_COMPARED_ROWS = 4096  # read per step when comparing two copies of a tensor


TensorFile = SafetensorsFile | TorchFile


@dataclass(frozen=True)
class Pieces:
    """One tensor of a checkpoint: one file for each rank that holds a piece of it."""

    name: str
    files: tuple[TensorFile, ...]

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(file.stored[self.name].shape for file in self.files)

    @property
    def dtype(self) -> torch.dtype:
        return self.files[0].stored[self.name].dtype

    def equals(self, other: Pieces) -> bool:
        """True if both have the same values in the same dtype, file by file."""
        pairs = zip(self.files, other.files, strict=False)
        return len(self.files) == len(other.files) and all(a is b or self._alike(a, b) for a, b in pairs)

    def are_copies(self, whole: Shape) -> bool:
        """True if all files that hold the full tensor of shape `whole` have the same values."""
        first, *others = [file for file in self.files if file.stored[self.name].shape == whole] or self.files[:1]
        return all(self._alike(first, other) for other in others)

    def joined(self, wanted: Shape, packed: Packed | None) -> LazyTensor | None:
        """Join the pieces into a tensor of shape `wanted`; None if they do not fit together."""
        if all(shape == wanted for shape in self.shapes):  # a single piece, or a replica on each rank
            return FileTensor(self.files[0], self.name)
        fit = tiling(self.shapes, wanted, packed)
        if fit is None:
            return None
        pieces: dict[int, LazyTensor] = {rank: FileTensor(file, self.name) for rank, file in enumerate(self.files)}
        return Joined.of(pieces, fit.spans(), fit.axis)

    def _alike(self, file: TensorFile, other: TensorFile) -> bool:
        is_like = file.stored[self.name] == other.stored[self.name]
        return is_like and same_values(FileTensor(file, self.name), FileTensor(other, self.name))


class Checkpoint:
    """All files of a checkpoint, opened with their headers read and checked. Values are read on demand.

    `told`: the source states that ranks saved pieces; otherwise this is inferred from the names. `in_pieces`: some
    tensor spans several files, so its layout is inferred from the shapes. `holds_replaced`: the tensors belong to
    replaced layers.
    """

    holds_replaced = False

    def __init__(self, files: Files):
        self.form, self._version = files.form, files.version
        opened = {path: open_file(path) for path in dict.fromkeys(files)}
        groups = [tuple(opened[path] for path in group) for group in files.groups]
        self.told = any(len(group) > 1 for group in groups)
        if not self.told and not files.where and len({frozenset(file.stored) for (file,) in groups}) == 1:
            groups = [tuple(file for (file,) in groups)]  # same names in every file: ranks' pieces
        self.files: tuple[TensorFile, ...] = tuple(opened.values())
        self.pieces = {name: Pieces(name, (opened[path],)) for name, path in files.where.items()}
        if absent := [f"{name} in {path}" for name, path in files.where.items() if name not in opened[path].stored]:
            raise CheckpointError(
                f"{files.form}: {len(absent)} tensors are not in the files that the index names: {', '.join(absent)}"
            )
        differing = []
        for group in groups:
            for name in dict.fromkeys(name for file in group for name in file.stored):
                pieces = Pieces(name, tuple(file for file in group if name in file.stored))
                first = self.pieces.setdefault(name, pieces)
                if name not in files.where and not first.equals(pieces):
                    differing.append(f"{name} in {first.files[0].path} and {pieces.files[0].path}")
        if differing:
            raise CheckpointError(
                f"{files.form}: {len(differing)} tensors have other values in another file: {'; '.join(differing)}; "
                "give the files of one checkpoint"
            )
        if not self.pieces:
            raise CheckpointError(f"{files.form}: holds no tensors: {', '.join(str(path) for path in opened)}")
        self.in_pieces = any(len(pieces.files) > 1 for pieces in self.pieces.values())

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_read for file in self.files)

    def joined(self, name: str, wanted: Shape, packed: Packed | None = None) -> LazyTensor | None:
        """The tensor `name` in the shape `wanted`, joined from the pieces that ranks saved; None if they do not fit."""
        if self._version is not None and packed is None and ".query_key_value." in name and self._version < 1:
            packed = Packed((max(wanted, default=0) // 3,) * 3)  # Megatron < 1.0: [q | k | v]; later, per head
        return self.pieces[name].joined(wanted, packed)


def open_file(path: Path) -> TensorFile:
    """Open the file in the format given by its suffix and read its header."""
    return SafetensorsFile(path) if path.suffix == ".safetensors" else TorchFile(path)


def same_values(tensor: LazyTensor, other: LazyTensor) -> bool:
    """True if two tensors of one shape and dtype have the same bytes; they are read part by part."""
    rows = tensor.shape[0] if tensor.shape else 0
    parts: list[Slices] = [(slice(i, i + _COMPARED_ROWS),) for i in range(0, rows, _COMPARED_ROWS)] or [()]
    both = ([source.read(part).reshape(-1).view(torch.uint8) for source in (tensor, other)] for part in parts)
    return all(torch.equal(*pair) for pair in both)


def in_words(pieces: Sequence[Shape]) -> str:
    """Format the shapes of pieces for an error message."""
    distinct = ", ".join(str(shape) for shape in dict.fromkeys(pieces))
    return distinct if len(pieces) == 1 else f"{len(pieces)} pieces of {distinct}"
