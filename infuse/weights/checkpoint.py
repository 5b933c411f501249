"""Look up the tensors of a checkpoint by name, merging the pieces that ranks saved.

Each name has one value: the one from the file that the index names, or the same value in every file that holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infuse.ground.errors import CheckpointError
from infuse.weights.coded import decoded
from infuse.weights.coded.quanto import Grouped
from infuse.weights.gguf.config import config_notes
from infuse.weights.gguf.file import GGUFFile
from infuse.weights.gguf.names import named_tensors
from infuse.weights.gguf.parts import SUFFIX, open_parts
from infuse.weights.lazy import FileTensor, Joined, LazyTensor, Shape, Slices
from infuse.weights.pieces import Packed, tiling
from infuse.weights.safetensors_file import SafetensorsFile
from infuse.weights.sources import Files, find_files
from infuse.weights.torch_file import TorchFile

_COMPARED_ROWS = 4096  # read per step when comparing two copies of a tensor


TensorFile = SafetensorsFile | TorchFile


@dataclass(frozen=True)
class Pieces:
    """One tensor of a checkpoint: one file for each rank that holds a piece of it."""

    name: str
    files: tuple[TensorFile, ...]

    @property
    def first(self) -> LazyTensor:
        """The tensor as stored; the first rank's piece if ranks saved pieces."""
        return FileTensor(self.files[0], self.name)

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


@dataclass(frozen=True)
class Whole:
    """A tensor that is already whole: made by a coded form, or from GGUF."""

    first: LazyTensor

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return (self.first.shape,)

    @property
    def dtype(self) -> torch.dtype:
        return self.first.dtype

    def are_copies(self, whole: Shape) -> bool:
        return True

    def joined(self, wanted: Shape, packed: Packed | None) -> LazyTensor | None:
        """The tensor if it has the shape `wanted`, or groups that make it up; else None."""
        if isinstance(self.first, Grouped):
            return self.first.in_shape(wanted)
        return self.first if self.first.shape == wanted else None


class Checkpoint:
    """All files of a checkpoint, opened with their headers read and checked. Values are read on demand.

    `told`: the source states that ranks saved pieces; otherwise this is inferred from the names. `in_pieces`: some
    tensor spans several files, so its layout is inferred from the shapes. `holds_replaced`: the tensors belong to
    replaced layers. `titles`: tensor → the quantized form that it is stored in. `notes`: what of it is not kept.
    `hint`: why other tensors look quantized but are not read.
    """

    holds_replaced = False

    def __init__(self, files: Files, of_model: Any = None):
        """Open `files`. `of_model`: the model's quantization_config, for files that have none beside them."""
        self.form, self._version = files.form, files.version
        self.files: tuple[TensorFile | GGUFFile, ...]
        if any(path.suffix == SUFFIX for path in files):
            self._take_gguf(files)
            return
        opened = {path: open_file(path) for path in dict.fromkeys(files)}
        groups = [tuple(opened[path] for path in group) for group in files.groups]
        self.told = any(len(group) > 1 for group in groups)
        if not self.told and not files.where and len({frozenset(file.stored) for (file,) in groups}) == 1:
            groups = [tuple(file for (file,) in groups)]  # same names in every file: ranks' pieces
        self.files = tuple(opened.values())
        pieces = {name: Pieces(name, (opened[path],)) for name, path in files.where.items()}
        if absent := [f"{name} in {path}" for name, path in files.where.items() if name not in opened[path].stored]:
            raise CheckpointError(
                f"{files.form}: {len(absent)} tensors are not in the files that the index names: {', '.join(absent)}"
            )
        _add_groups(pieces, groups, files)
        if not pieces:
            raise CheckpointError(f"{files.form}: holds no tensors: {', '.join(str(path) for path in opened)}")
        self.in_pieces = any(len(one.files) > 1 for one in pieces.values())
        whole = {name: FileTensor(one.files[0], name) for name, one in pieces.items() if len(one.files) == 1}
        coded = decoded(files.form, whole, of_model)
        self.titles, self.notes, self.hint = coded.titles, coded.notes, coded.hint
        self.pieces: dict[str, Pieces | Whole] = {name: one for name, one in pieces.items() if name not in coded.used}
        self.pieces |= {name: Whole(tensor) for name, tensor in coded.tensors.items()}

    def _take_gguf(self, files: Files) -> None:
        """Open the GGUF files of one model: all tensors are made of theirs, under transformers' names."""
        parts = open_parts(list(files))
        self.files, self.told, self.in_pieces, self.hint = parts, False, False, None
        tensors = named_tensors(parts)
        self.notes = config_notes(parts)
        self.titles = {name: "GGUF" for name, tensor in tensors.items() if tensor.coded is not None}
        self.pieces = {name: Whole(tensor) for name, tensor in tensors.items()}

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_read for file in self.files)

    def joined(self, name: str, wanted: Shape, packed: Packed | None = None) -> LazyTensor | None:
        """The tensor `name` in the shape `wanted`, joined from the pieces that ranks saved; None if they do not fit."""
        if self._version is not None and packed is None and ".query_key_value." in name and self._version < 1:
            packed = Packed((max(wanted, default=0) // 3,) * 3)  # Megatron < 1.0: [q | k | v]; later, per head
        return self.pieces[name].joined(wanted, packed)


def _add_groups(pieces: dict[str, Pieces], groups: Sequence[tuple[TensorFile, ...]], files: Files) -> None:
    """Add the tensors of all files to `pieces`; CheckpointError if one has other values in another file."""
    differing = []
    for group in groups:
        for name in dict.fromkeys(name for file in group for name in file.stored):
            found = Pieces(name, tuple(file for file in group if name in file.stored))
            first = pieces.setdefault(name, found)
            if name not in files.where and not first.equals(found):
                differing.append(f"{name} in {first.files[0].path} and {found.files[0].path}")
    if differing:
        raise CheckpointError(
            f"{files.form}: {len(differing)} tensors have other values in another file: {'; '.join(differing)}; "
            "give the files of one checkpoint"
        )


def stored_names(source: str) -> frozenset[str]:
    """The names of all tensors in a checkpoint's files, GGUF's as transformers calls them. Only headers are read."""
    files = find_files(source)
    if any(path.suffix == SUFFIX for path in files):
        return frozenset(named_tensors(open_parts(list(files))))
    return frozenset(name for path in dict.fromkeys(files) for name in open_file(path).stored)


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
