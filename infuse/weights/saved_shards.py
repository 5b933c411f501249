"""Our own shards as a checkpoint: each tensor assembled from the spans in the ranks' files, or any rank's part of it.

Positions count rows or inputs of the whole tensor; a file may store fewer columns than positions (see Joined).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from infuse.errors import CheckpointError
from infuse.parallel.slices import Cut, Range, Tiling, total
from infuse.weights.checkpoint import Joined, TensorFile
from infuse.weights.fill import Wanted
from infuse.weights.mapped import FirstUse, StoredMatrix
from infuse.weights.pieces import Packed, Shape
from infuse.weights.reader import Slices
from infuse.weights.safetensors_file import Checksums, SafetensorsFile


class _Opened(dict[int, SafetensorsFile]):
    """Open files by rank; a missing one is opened on access."""

    def __init__(self, paths: Sequence[Path], checksums: Sequence[Checksums]):
        super().__init__()
        self._paths, self._checksums = paths, checksums

    def __missing__(self, rank: int) -> SafetensorsFile:
        self[rank] = SafetensorsFile(self._paths[rank], self._checksums[rank])
        return self[rank]


@dataclass(frozen=True)
class SavedTensor(Joined):
    """One tensor of our shards. `is_cut`: split across ranks; otherwise every file that holds it holds all of it."""

    is_cut: bool = False

    @property
    def shape(self) -> Shape:
        bands, whole = self.tiling.bands, super().shape
        return (bands[-1][1], self.tiling.width) if bands else whole

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return (self.shape,)

    def are_copies(self, whole: Shape) -> bool:
        return True

    def along(self, cut: Cut | None) -> SavedTensor:
        """Return the tensor addressed in positions of `cut`, if ranks have not cut it."""
        if self.is_cut or cut is None:
            return self
        (rank,) = self.files
        return replace(self, tiling=_of_one(cut.axis, cut.whole_length, rank), first=rank)

    def read(self, part: Slices = ()) -> Tensor:
        return super().read(part) if not self.tiling.bands else self.part(None)[part]

    def part(self, cut: Cut | None) -> Tensor:
        """Read the tensor as it is stored, or a rank's part of it."""
        found = self.along(cut)
        tiling = found.tiling
        if not found._is_crossed_by(cut):
            return found.read() if cut is None else found.ranges(cut.ranges)
        rows, (columns, width) = found._rows(cut), found._columns_of(cut)
        if tiling.axis == 0:
            stored = self.stored.shape[1]
            narrow = [
                slice(0, 1) if stored == 1 else slice(a * stored // width, b * stored // width) for a, b in columns
            ]
            return torch.cat([found.ranges(rows, (slice(None), one)) for one in narrow], dim=1)
        return torch.cat([
            found.ranges(tiling.in_band(number, columns), (slice(max(start, first) - first, min(stop, last) - first),))
            for start, stop in rows
            for number, (first, last) in enumerate(found._bands)
            if max(start, first) < min(stop, last)
        ])  # fmt: skip

    def _is_crossed_by(self, cut: Cut | None) -> bool:
        """Whether a part that is read has other rows than those that ranks have, or is cut along the other axis."""
        return bool(self.tiling.bands) or (cut is not None and (cut.rows is not None or cut.axis != self.tiling.axis))

    @property
    def _bands(self) -> tuple[Range, ...]:
        return self.tiling.bands or ((0, self.stored.shape[0]),)

    def _rows(self, cut: Cut | None) -> tuple[Range, ...]:
        if cut is not None and cut.axis == 0:
            return cut.ranges
        if cut is not None and cut.rows is not None:
            return (cut.rows,)
        return ((0, self.tiling.length if self.tiling.axis == 0 else self._bands[-1][1]),)

    def _columns_of(self, cut: Cut | None) -> tuple[tuple[Range, ...], int]:
        """The inputs of a part, and how many the whole has."""
        if cut is not None and cut.axis == 1:
            return cut.ranges, cut.whole_length
        return ((0, self.tiling.width),), self.tiling.width

    def fault(self, cut: Cut | None, wanted: Shape, dtype: torch.dtype | None) -> str | None:
        """Return why `cut` of this cannot fill a tensor of `wanted` shape and `dtype` (None: any floating), or None."""
        found = self.along(cut)
        tiling, crossed = found.tiling, found._is_crossed_by(cut)
        axis, own = tiling.axis, cut.length if cut else tiling.length
        other = cut is not None and axis == cut.axis and tiling.width != cut.whole_length
        if other or (crossed and len(wanted) != 2):
            there = f"{tiling.width} on axis {axis}"
            return f"{there}, the model has {cut.whole_length} on axis {cut.axis}" if cut else f"{there}, not {wanted}"
        for rank, file in self.files.items():
            if self.name not in file.stored:  # a bias that another rank adds
                continue
            shape, stored = file.stored[self.name].shape, file.stored[self.name].dtype
            if stored != dtype if dtype else not stored.is_floating_point:
                return f"{stored}, the model has {dtype or 'floating values'}"
            like = shape == wanted
            if crossed:
                like = found._is_part(rank, shape, cut, wanted)
            elif (self.is_cut or cut) and len(shape) == len(wanted):
                others = [size for at, size in enumerate(shape) if at != axis]
                like = others == [size for at, size in enumerate(wanted) if at != axis] and (
                    shape[axis] * own == wanted[axis] * tiling.part_length(rank) or shape[axis] == wanted[axis] == 1
                )
            if not like:
                return f"{shape}, the model has {wanted}"
        return None

    def _is_part(self, rank: int, shape: Shape, cut: Cut | None, wanted: Shape) -> bool:
        """Whether a file's `shape` is that of its rank's rows and inputs, if those of `cut` have the shape `wanted`."""
        tiling, rows, (columns, width) = self.tiling, self._rows(cut), self._columns_of(cut)
        held = tiling.part_length(rank)
        if not held:
            return True
        (first, last), inputs = (0, held), width
        if tiling.axis == 1:
            first, last = self._bands[tiling.parts[rank][0][0] // tiling.width]
            inputs = held
        of_inputs = shape[1] * total(columns) == wanted[1] * inputs or shape[1] == wanted[1] == 1
        whole = tiling.length if tiling.axis == 0 else self._bands[-1][1]
        return shape[0] == last - first and total(rows) == wanted[0] and rows[-1][1] <= whole and of_inputs


class SavedShards:
    """The files of all ranks, or of `rank` alone; in that case other files are opened on demand.

    `of_buffers`: the tilings of quantized matrices, in rows and inputs, by the names of their buffers.

    `layouts`: the layouts of the matrices of experts that are stored as kernels read them, by the paths of the
    matrices. `maps`: experts are mapped where possible; otherwise `unmapped` says of each matrix why not.
    """

    holds_replaced = True

    def __init__(
        self, form: str, paths: Sequence[Path], tilings: Mapping[str, Tiling], checksums: Sequence[Checksums],
        rank: int | None, layouts: Mapping[str, str] = MappingProxyType({}), maps: bool = False,
        of_buffers: Mapping[str, Tiling] = MappingProxyType({}),
    ):  # fmt: skip
        self.maps, self._rank, self._layouts = maps, rank, layouts
        self.unmapped: dict[str, str] = {}
        self.form, self.told, self.in_pieces = form, True, False
        self.pieces: dict[str, SavedTensor] = {}
        self._opened = _Opened(paths, checksums)
        opened = {number: self._opened[number] for number in range(len(paths)) if rank in (None, number)}
        for name in dict.fromkeys(name for file in opened.values() for name in file.stored):
            found = {number: file for number, file in opened.items() if name in file.stored}
            cut = tilings.get(name) or of_buffers.get(name)
            if cut is None:
                first, file = next(iter(found.items()))
                whole = _of_one(0, next(iter(file.stored[name].shape), 1), first)
                self.pieces[name] = SavedTensor(name, {first: file}, whole, first)
                continue
            if without := [file for number, file in opened.items() if number not in found and cut.parts[number]]:
                raise CheckpointError(f"{name} is missing in {', '.join(str(file.path) for file in without)}")
            for number, file in found.items():
                _check_cut(file, name, cut, number, name in tilings)
            self.pieces[name] = SavedTensor(name, self._opened, cut, min(found) if rank is None else rank, is_cut=True)

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_read for file in self._opened.values())

    def joined(self, name: str, wanted: Shape, packed: Packed | None) -> Joined | None:
        tensor = self.pieces[name]
        return tensor if tensor.shape == wanted else None

    def part(self, name: str, cut: Cut | None) -> Tensor:
        """Read a tensor as stored, or a rank's part of it."""
        return self.pieces[name].part(cut)

    def experts(self, path: str, tensors: Mapping[str, Wanted], count: int, layout: str | None) -> StoredMatrix | None:
        """The matrix of `count` experts at `path`, whose kernel reads `layout` (None: rows), as it is stored.

        None if it is stored in rows and is not mapped: then it is built from its tensors.
        """
        stored = self._layouts.get(path)
        leaves = {name: name.rpartition(".")[2] for name in tensors}
        if self.maps:
            why = self._unmappable(tensors, stored, layout)
            if why is None:
                file = self._opened[self._rank or 0]
                mapped = {leaf: file.mapped(name) for name, leaf in leaves.items()}
                whole = {leaf: tensor for leaf, tensor in mapped.items() if tensor is not None}
                if len(whole) == len(mapped):
                    return StoredMatrix(whole, stored, first_use=FirstUse(file, tuple(tensors), count))
                why = "its tensors are not aligned in their file"
            self.unmapped[path] = why
        if stored is None:
            return None
        read = {leaf: self.part(name, tensors[name].cut) for name, leaf in leaves.items()}
        return StoredMatrix(read, stored)

    def _unmappable(self, tensors: Mapping[str, Wanted], stored: str | None, layout: str | None) -> str | None:
        if stored != layout:
            return f"it is stored in {stored or 'rows'}, and the kernel reads {layout or 'rows'}"
        if self._rank is None:
            return "the ranks that saved it cut it otherwise"
        for name, wanted in tensors.items():
            found = self.pieces[name].dtype
            if wanted.dtype not in (None, found):
                return f"it is stored in {found}, and the model runs in {wanted.dtype}"
        return None

    def fault(self, name: str, cut: Cut | None, wanted: Shape, dtype: torch.dtype | None) -> str | None:
        """Return why the stored tensor `name` does not give shape `wanted` in `dtype`; None if it does."""
        if name not in self.pieces:
            return f"missing  {name}"
        fault = self.pieces[name].fault(cut, wanted, dtype)
        return fault and f"misshaped  {name}: {fault}"


def _check_cut(file: TensorFile, name: str, cut: Tiling, rank: int, is_plain: bool) -> None:
    """Raise CheckpointError if a tensor's shape contradicts the part that the index gives this rank."""
    shape, own = file.stored[name].shape, cut.part_length(rank)
    if cut.axis >= len(shape):
        raise CheckpointError(f"{file.path}: {name} is {shape}, and the index cuts it on axis {cut.axis}")
    if is_plain and shape[cut.axis] != own:
        raise CheckpointError(
            f"{file.path}: {name} is {shape}, and the index gives this rank {own} of {cut.width} on axis {cut.axis}"
        )
    if cut.bands and own and shape[0] != (rows := total(cut.bands[cut.parts[rank][0][0] // cut.width :][:1])):
        raise CheckpointError(f"{file.path}: {name} is {shape}, and the index gives this rank {rows} rows")


def _of_one(axis: int, length: int, rank: int) -> Tiling:
    """Tiling of a tensor that `rank` holds whole."""
    return Tiling(axis, length, (*((),) * rank, ((0, length),)))
