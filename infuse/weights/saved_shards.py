"""Our own shards as a checkpoint: each tensor from the spans of ranks' files that make it up, or any rank's part of it.

Positions count rows or inputs of the whole; what a file stores of them may be fewer columns (see Joined).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from infuse.errors import CheckpointError
from infuse.parallel.slices import Cut, Tiling
from infuse.weights.checkpoint import Joined, TensorFile
from infuse.weights.pieces import Packed, Shape
from infuse.weights.safetensors_file import Checksums, SafetensorsFile

_OF_WEIGHTS = ("data", "scale", "zero")  # what a quantized weight is stored as


class _Opened(dict[int, TensorFile]):
    """The files that are open, by rank; another one is opened when it is asked for."""

    def __init__(self, paths: Sequence[Path], checksums: Sequence[Checksums]):
        super().__init__()
        self._paths, self._checksums = paths, checksums

    def __missing__(self, rank: int) -> TensorFile:
        self[rank] = SafetensorsFile(self._paths[rank], self._checksums[rank])
        return self[rank]


@dataclass(frozen=True)
class SavedTensor(Joined):
    """One tensor of our shards. `is_cut`: ranks share it; else each file that has it has it whole."""

    is_cut: bool

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return (self.shape,)

    def are_copies(self, whole: Shape) -> bool:
        return True

    def along(self, cut: Cut) -> Joined:
        """The tensor in the positions of `cut`."""
        if self.is_cut:
            return self
        (rank,) = self.files
        return Joined.of(self.name, self.files, _of_one(cut.axis, cut.whole_length, rank), rank)

    def fault(self, cut: Cut | None, wanted: Shape, dtype: torch.dtype | None) -> str | None:
        """Why `cut` of this does not make a tensor of shape `wanted` in `dtype` (None: any floating one), or None."""
        tiling = self.along(cut).tiling if cut else self.tiling
        axis, own = tiling.axis, cut.length if cut else tiling.length
        if cut and (axis, tiling.length) != (cut.axis, cut.whole_length):
            return f"{tiling.length} on axis {axis}, the model has {cut.whole_length} on axis {cut.axis}"
        for rank, file in self.files.items():
            shape, found = file.stored[self.name].shape, file.stored[self.name].dtype
            if found != dtype if dtype else not found.is_floating_point:
                return f"{found}, the model has {dtype or 'floating values'}"
            if self.is_cut or cut:
                there = tiling.part_length(rank)
                like = len(shape) == len(wanted) and _without(shape, axis) == _without(wanted, axis)
                like = like and (shape[axis] * own == wanted[axis] * there or shape[axis] == wanted[axis] == 1)
            else:
                like = shape == wanted
            if not like:
                return f"{shape}, the model has {wanted}"
        return None


class SavedShards:
    """The files of all ranks, or of `rank` alone: the others' are opened if something of them is asked for."""

    holds_replaced = True

    def __init__(
        self,
        form: str,
        paths: Sequence[Path],
        tilings: Mapping[str, Tiling],
        checksums: Sequence[Checksums],
        rank: int | None,
    ):
        self.form, self.told, self.in_pieces = form, True, False
        self.pieces: dict[str, SavedTensor] = {}
        self._opened = _Opened(paths, checksums)
        opened = {number: self._opened[number] for number in range(len(paths)) if rank in (None, number)}
        for name in dict.fromkeys(name for file in opened.values() for name in file.stored):
            found = {number: file for number, file in opened.items() if name in file.stored}
            cut = tilings.get(name) or tilings.get(_weight_of(name))
            if cut is None:
                first, file = next(iter(found.items()))
                whole = _of_one(0, next(iter(file.stored[name].shape), 1), first)
                self.pieces[name] = SavedTensor(name, {first: file}, whole, whole.spans(first), False)
                continue
            if len(found) < len(opened):
                without = ", ".join(str(file.path) for number, file in opened.items() if number not in found)
                raise CheckpointError(f"{name} is missing in {without}")
            for number, file in found.items():
                _check_cut(file, name, cut, number, name in tilings)
            self.pieces[name] = SavedTensor(name, self._opened, cut, cut.spans(rank or 0), True)

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_read for file in self._opened.values())

    def joined(self, name: str, wanted: Shape, packed: Packed | None) -> Joined | None:
        tensor = self.pieces[name]
        return tensor if tensor.shape == wanted else None

    def part(self, name: str, cut: Cut | None) -> Tensor:
        """A tensor as it is stored, or a rank's part of it."""
        tensor = self.pieces[name]
        return tensor.along(cut).ranges(cut.ranges) if cut else tensor.read()

    def fault(self, name: str, cut: Cut | None, wanted: Shape, dtype: torch.dtype | None) -> str | None:
        """Why what is stored of `name` does not make up a tensor of shape `wanted`; None where it does."""
        if name not in self.pieces:
            return f"missing  {name}"
        fault = self.pieces[name].fault(cut, wanted, dtype)
        return fault and f"misshaped  {name}: {fault}"


def _check_cut(file: TensorFile, name: str, cut: Tiling, rank: int, is_plain: bool) -> None:
    """CheckpointError where the shape of a tensor is not what the index says of the rank's part."""
    shape, own = file.stored[name].shape, cut.part_length(rank)
    if cut.axis >= len(shape):
        raise CheckpointError(f"{file.path}: {name} is {shape}, and the index cuts it on axis {cut.axis}")
    if is_plain and shape[cut.axis] != own:
        raise CheckpointError(
            f"{file.path}: {name} is {shape}, and the index gives this rank {own} of {cut.length} on axis {cut.axis}"
        )


def _of_one(axis: int, length: int, rank: int) -> Tiling:
    """What `rank` has whole."""
    return Tiling(axis, length, (*((),) * rank, ((0, length),)))


def _weight_of(name: str) -> str:
    owner, _, leaf = name.rpartition(".")
    return f"{owner}.weight" if leaf in _OF_WEIGHTS else name


def _without(shape: Shape, axis: int) -> Shape:
    return shape[:axis] + shape[axis + 1 :]
