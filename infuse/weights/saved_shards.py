"""Our own shards as a checkpoint: whole tensors, joined from the ranks' files, or any rank's part of them.

Ranks may cut a tensor differently from the ranks that saved it, but along the same axis; `shards.plan` refuses others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from infuse.ground.errors import CheckpointError
from infuse.parallel.slices import Band, Cut, Span, are_along, taken
from infuse.quant.format import Buffer
from infuse.weights.fill import ORDER, VALUES, Wanted
from infuse.weights.lazy import FileTensor, Joined, LazyTensor, Shape
from infuse.weights.mapped import FirstUse, StoredMatrix
from infuse.weights.pieces import Packed
from infuse.weights.safetensors_file import Checksums, SafetensorsFile


class _Opened(dict[int, SafetensorsFile]):
    """Open files by rank; a missing one is opened on access."""

    def __init__(self, paths: Sequence[Path], checksums: Sequence[Checksums]):
        super().__init__()
        self._paths, self._checksums = paths, checksums

    def __missing__(self, rank: int) -> SafetensorsFile:
        self[rank] = SafetensorsFile(self._paths[rank], self._checksums[rank])
        return self[rank]


class _RankTensors(dict[int, LazyTensor]):
    """The pieces of the tensor `name` by rank; the file of a rank is opened on access."""

    def __init__(self, files: _Opened, name: str):
        super().__init__()
        self._files, self._name = files, name

    def __missing__(self, rank: int) -> LazyTensor:
        return FileTensor(self._files[rank], self._name)


@dataclass(frozen=True)
class SavedTensor:
    """One tensor of our shards. `bands`: how ranks cut it; () if each file that has it has the whole tensor.

    `first`: rank whose file is read if several have the same values. `is_own`: that file has exactly this rank's part,
    so no other file is read.
    """

    name: str
    files: _Opened
    bands: tuple[Band, ...]
    first: int
    is_own: bool

    @property
    def piece(self) -> LazyTensor:
        """The piece in the file of rank `first`."""
        return FileTensor(self.files[self.first], self.name)

    @property
    def dtype(self) -> torch.dtype:
        return self.piece.dtype

    @property
    def shape(self) -> Shape:
        """Shape of the whole tensor. For a buffer of codes, the axis that ranks cut counts inputs."""
        shape = list(self.piece.shape)
        if self.bands:
            shape[self.bands[0].tiling.axis] = self.bands[0].tiling.length
            shape[0] = shape[0] if self.bands[-1].rows is None else self.bands[-1].rows[1]
        return tuple(shape)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return (self.shape,)

    def are_copies(self, whole: Shape) -> bool:
        return True

    def whole(self) -> LazyTensor:
        """Join the whole tensor from the ranks' files. Only for tensors that are not coded."""
        if not self.bands:
            return self.piece
        (band,) = self.bands
        pieces = _RankTensors(self.files, self.name)
        return Joined(pieces, band.tiling.spans(self.first), band.tiling.axis, self.shape, self.dtype)

    def part(self, cut: Cut | None, buffer: Buffer = VALUES) -> LazyTensor:
        """Return the tensor as stored, or a rank's part of it. `buffer` maps inputs of the whole to columns."""
        if self.is_own and self.bands:
            return self.piece
        if not self.bands:
            return self.piece if cut is None else _cut(self.piece, cut, buffer)
        bands = [self._along(band, cut, buffer) for band in self.bands]
        return bands[0] if len(bands) == 1 else Joined.of(dict(enumerate(bands)))

    def _along(self, band: Band, cut: Cut | None, buffer: Buffer) -> LazyTensor:
        """Return a rank's part of a band, cut along the same axis."""
        tiling = band.tiling
        assert cut is None or are_along(self.bands, cut), (self.name, cut)
        spans = taken(tiling.spans(self.first), ((0, tiling.length),) if cut is None else cut.ranges)
        spans = spans or [Span(self.first, 0, 0)]  # a rank without a part
        return _joined(_RankTensors(self.files, self.name), spans, tiling.axis, buffer)

    def fault(self, wanted: Wanted, ranks: int) -> str | None:
        """Return why this tensor cannot provide `wanted`; None if it can."""
        cut = wanted.cut
        if cut is not None and self.bands and not self.is_own:
            tiling = self.bands[0].tiling
            if not are_along(self.bands, cut) or cut.whole_length != tiling.length:
                return f"{tiling.length} on axis {tiling.axis}, the model has {cut.whole_length} on axis {cut.axis}"
        for rank in range(ranks) if self.bands and not self.is_own else (self.first,):
            if self.name not in self.files[rank].stored:  # a bias that another rank adds
                continue
            stored = self.files[rank].stored[self.name]
            if stored.dtype != wanted.dtype if wanted.dtype else not stored.dtype.is_floating_point:
                return f"{stored.dtype}, the model has {wanted.dtype or 'floating values'}"
            if stored.shape != self._piece_shape(rank, wanted):
                return f"{stored.shape}, the model has {wanted.shape}"
        return None

    def _piece_shape(self, rank: int, wanted: Wanted) -> tuple[int | None, ...] | None:
        """Expected shape of a rank's piece of `wanted`; None if the index cuts a tensor of another shape."""
        cut, shape = wanted.cut, list[int | None](wanted.shape)
        if (self.bands and self.is_own) or not (self.bands or cut):
            return wanted.shape
        if cut is not None and not self.bands:
            shape[cut.axis] = _length(cut.axis, cut.whole_length, wanted.buffer)
            if cut.rows is not None:  # the total number of rows is unknown
                shape[0] = max(cut.rows[1], self.piece.shape[0])
            return tuple(shape)
        axis, length, rows = self.bands[0].tiling.axis, self.bands[0].tiling.length, self.bands[-1].rows
        if axis >= len(shape) or (rows is not None and rows[1] != shape[0]):
            return None
        if cut is None and _length(axis, length, wanted.buffer) != shape[axis]:
            return None
        for band in self.bands:
            if band.tiling.parts[rank] or len(self.bands) == 1:
                shape[axis] = _length(axis, band.tiling.part_length(rank), wanted.buffer)
                shape[0] = shape[0] if band.rows is None else band.rows[1] - band.rows[0]
        return tuple(shape)


def _joined(pieces: Mapping[int, LazyTensor], spans: Sequence[Span], axis: int, buffer: Buffer) -> LazyTensor:
    """Join spans of inputs or rows of `pieces`."""
    if axis == 1:
        columns = [(span.source, buffer.of_inputs(span.start, span.stop)) for span in spans]
        spans = [Span(source, part.start, part.stop) for source, part in columns]
        if buffer.inputs is None:  # a per-row scale applies to every part of the row
            spans = spans[:1]
    return Joined.of(pieces, spans, axis)


def _cut(whole: LazyTensor, cut: Cut, buffer: Buffer) -> LazyTensor:
    """Cut a rank's part out of a tensor that one file has whole."""
    if cut.rows is not None:
        whole = Joined.of({0: whole}, [Span(0, *cut.rows)])
    return _joined({0: whole}, [Span(0, start, stop) for start, stop in cut.ranges], cut.axis, buffer)


def _length(axis: int, positions: int, buffer: Buffer) -> int | None:
    """Number of rows, or of columns of `buffer`, for `positions`; None if they split a group of inputs."""
    if axis == 0:
        return positions
    return None if buffer.inputs is not None and positions % buffer.inputs else buffer.width(positions)


@dataclass(frozen=True)
class ShardFiles:
    """The files of our shards, one for each rank that saved, with their cuts and checksums.

    `bands`: how ranks cut each tensor. `coded`: paths of the matrices stored in a number format. `layouts`: path →
    kernel layout, for matrices stored in one.
    """

    paths: Sequence[Path]
    checksums: Sequence[Checksums]
    bands: Mapping[str, tuple[Band, ...]]
    coded: Collection[str]
    layouts: Mapping[str, str]


class SavedShards:
    """The files of all ranks, or of `rank` alone; in that case other files are opened on demand.

    `maps`: memory-map experts where possible; `unmapped` has the reason for each matrix that is not.
    """

    holds_replaced = True

    def __init__(self, form: str, files: ShardFiles, rank: int | None, maps: bool = False):
        self.maps, self._rank, self._layouts = maps, rank, files.layouts
        self.unmapped: dict[str, str] = {}
        self.form, self.told, self.in_pieces = form, True, False
        self.pieces: dict[str, SavedTensor] = {}
        self._ranks, self._opened = len(files.paths), _Opened(files.paths, files.checksums)
        opened = {number: self._opened[number] for number in range(self._ranks) if rank in (None, number)}
        for name in dict.fromkeys(name for file in opened.values() for name in file.stored):
            bands = files.bands.get(name)
            owner, _, leaf = name.rpartition(".")
            if bands is None and owner in files.coded and leaf not in ("bias", ORDER):  # cut as their weight is
                bands = files.bands.get(f"{owner}.weight")
            first = min(number for number, file in opened.items() if name in file.stored)
            if bands is not None:
                _check_pieces(name, bands, opened, name in files.bands)
                first = first if rank is None else rank
            self.pieces[name] = SavedTensor(name, self._opened, bands or (), first, rank is not None)

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_read for file in self._opened.values())

    def joined(self, name: str, wanted: Shape, packed: Packed | None = None) -> LazyTensor | None:
        tensor = self.pieces[name]
        # Only experts have several bands, and they are never read under the model's names.
        return tensor.whole() if tensor.shape == wanted and len(tensor.bands) < 2 else None

    def part(self, name: str, wanted: Wanted) -> LazyTensor:
        """A tensor as stored, or a rank's part of it."""
        return self.pieces[name].part(wanted.cut, wanted.buffer)

    def experts(self, path: str, tensors: Mapping[str, Wanted], count: int, layout: str | None) -> StoredMatrix | None:
        """Return the matrix of `count` experts at `path` as stored. Its kernel reads `layout` (None: rows).

        None if it is stored in rows and not mapped; the caller then builds it from its tensors.
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
        return StoredMatrix({leaf: self.part(name, tensors[name]).read() for name, leaf in leaves.items()}, stored)

    def _unmappable(self, tensors: Mapping[str, Wanted], stored: str | None, layout: str | None) -> str | None:
        if stored != layout:
            return f"it is stored in {stored or 'rows'}, and the kernel reads {layout or 'rows'}"
        if self._rank is None:
            return "the ranks that saved it cut it otherwise"
        for name, wanted in tensors.items():
            dtype = self.pieces[name].dtype
            if wanted.dtype not in (None, dtype):
                return f"it is stored in {dtype}, and the model runs in {wanted.dtype}"
        return None

    def fault(self, name: str, wanted: Wanted) -> str | None:
        """Return why the stored tensor `name` cannot provide `wanted`; None if it can."""
        if name not in self.pieces:
            return f"missing  {name}"
        fault = self.pieces[name].fault(wanted, self._ranks)
        return fault and f"misshaped  {name}: {fault}"


def _check_pieces(name: str, bands: Sequence[Band], opened: Mapping[int, SafetensorsFile], plain: bool) -> None:
    """Raise CheckpointError if a rank's file lacks its piece, or if its shape contradicts the index.

    `plain`: the tensor is not coded, so its columns are inputs, as in the index.
    """
    holders = {number: file for number, file in opened.items() if name in file.stored}
    for band in bands:
        tiling = band.tiling
        without = [str(opened[number].path) for number in opened if number not in holders and tiling.parts[number]]
        if without:
            raise CheckpointError(f"{name} is missing in {', '.join(without)}")
        for number, file in holders.items():
            shape, length = file.stored[name].shape, tiling.part_length(number)
            if tiling.axis >= len(shape):
                raise CheckpointError(f"{file.path}: {name} is {shape}, and the index cuts it on axis {tiling.axis}")
            if not length and len(bands) > 1:
                continue
            if plain and shape[tiling.axis] != length:
                part = f"{length} of {tiling.length} on axis {tiling.axis}"
                raise CheckpointError(f"{file.path}: {name} is {shape}, and the index gives this rank {part}")
            if band.rows is not None and shape[0] != (rows := band.rows[1] - band.rows[0]):
                raise CheckpointError(f"{file.path}: {name} is {shape}, and the index gives this rank {rows} rows")
