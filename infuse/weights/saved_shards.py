"""Our own shards as a checkpoint: how ranks cut each tensor, and the runs of their files that make up the part of any
other rank.

Positions count what a tensor is cut in, rows or inputs of the whole, in every file that holds something of it: codes
that share bytes and scales that stand for groups of inputs are found by the share of a piece's columns that a run is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infuse.errors import CheckpointError
from infuse.parallel.slices import Cut, Range
from infuse.quant.format import QuantFormat, QuantizedWeight
from infuse.quant.parse import quant_format
from infuse.weights.checkpoint import Checkpoint, Pieces, TensorFile
from infuse.weights.pieces import Layout, Run
from infuse.weights.reader import Part, Stored
from infuse.weights.safetensors_file import Checksums, SafetensorsFile
from infuse.weights.sources import Files

_OF_WEIGHTS = ("data", "scale", "zero")  # what a quantized weight is stored as


@dataclass(frozen=True)
class Shared:
    """How ranks cut a tensor of `size` positions along `axis`: the ranges that each has, in the order in which it has
    them.
    """

    axis: int
    size: int
    ranks: tuple[tuple[Range, ...], ...]

    def length(self, rank: int) -> int:
        return sum(stop - start for start, stop in self.ranks[rank])

    def layout(self, first: int = 0) -> Layout:
        """What makes up the whole; of several ranks that have the same, `first`, then the lowest. CheckpointError: none
        has it.
        """
        runs, at = [], 0
        while at < self.size:
            rank = next((rank for rank in (first, *range(len(self.ranks))) if self._spot(rank, at)), None)
            if rank is None:
                raise CheckpointError(f"position {at} of {self.size} is on no rank: {_in_text(self.ranks)}")
            start, stop = self._spot(rank, at) or (0, 0)
            stop = min(stop, *(begin for begin, _ in self.ranks[first] if begin > at), self.size)
            runs.append(Run(rank, start, start + stop - at))
            at = stop
        return Layout(self.axis, tuple(runs))

    def _spot(self, rank: int, at: int) -> Range | None:
        """Where in its own piece `rank` has position `at`, and the position at which that range ends."""
        before = 0
        for start, stop in self.ranks[rank]:
            if start <= at < stop:
                return before + at - start, stop
            before += stop - start
        return None


def alone(axis: int, size: int) -> Shared:
    """What one rank has to itself."""
    return Shared(axis, size, (((0, size),),))


def cuts_in_text(cuts: Mapping[str, Cut]) -> str:
    """One rank's cuts, for the header of its file."""
    return "\n".join(f"{cut.axis} {sum(cut.sizes)} {name} {_in_text([cut.ranges])[0]}" for name, cut in cuts.items())


def index_of_cuts(texts: Sequence[str]) -> list[dict[str, Any]]:
    """All ranks' `cuts_in_text` for the index: tensors that are cut alike in one entry; ranges as "start:stop", a text
    for each rank.
    """
    by_name: dict[tuple[str, ...], list[str]] = {}
    for text in texts:
        for line in text.splitlines():
            axis, size, name, *ranges = line.split(" ")
            by_name.setdefault((name, axis, size), []).append(" ".join(ranges))
    alike: dict[tuple[str, ...], list[str]] = {}
    for (name, axis, size), ranks in by_name.items():
        if len(ranks) != len(texts):
            raise CheckpointError(f"{name}: {len(ranks)} of {len(texts)} ranks have a part of it")
        alike.setdefault((axis, size, *ranks), []).append(name)
    return [
        {"axis": int(a), "size": int(s), "ranks": ranks, "tensors": names} for (a, s, *ranks), names in alike.items()
    ]


def shared_tensors(cuts: Iterable[Mapping[str, Any]]) -> dict[str, Shared]:
    """Name → how it is cut, from what `index_of_cuts` wrote; ValueError, KeyError, TypeError or AttributeError where it
    did not.
    """
    found: dict[str, Shared] = {}
    for entry in cuts:
        ranks = tuple(
            tuple((int(a), int(b)) for a, b in (one.split(":") for one in text.split())) for text in entry["ranks"]
        )
        shared = Shared(int(entry["axis"]), int(entry["size"]), ranks)
        if shared.axis < 0 or not all(0 <= start < stop <= shared.size for ranges in ranks for start, stop in ranges):
            raise ValueError(f"no parts of {shared.size} on axis {shared.axis}: {'; '.join(entry['ranks'])}")
        found.update(dict.fromkeys(entry["tensors"], shared))
    return found


def _in_text(ranks: Iterable[tuple[Range, ...]]) -> list[str]:
    return [" ".join(f"{start}:{stop}" for start, stop in ranges) for ranges in ranks]


class _Opened(dict[int, TensorFile]):
    """The files that are open, by rank; another one is opened when it is asked for."""

    def __init__(self, paths: Sequence[Path], checksums: Sequence[Checksums]):
        super().__init__()
        self._paths, self._checksums = paths, checksums

    def __missing__(self, rank: int) -> TensorFile:
        self[rank] = SafetensorsFile(self._paths[rank], self._checksums[rank])
        return self[rank]


@dataclass(frozen=True)
class Joined:
    """One tensor that ranks share, as a file that holds it whole. `files`: by rank."""

    name: str
    files: dict[int, TensorFile]
    shared: Shared
    layout: Layout
    bytes_read = 0  # the files themselves count

    @property
    def path(self) -> Any:
        return next(iter(self.files.values())).path

    @property
    def stored(self) -> dict[str, Stored]:
        one = next(iter(self.files.values())).stored[self.name]
        shape = list(one.shape)
        shape[self.shared.axis] = self.shared.size
        return {self.name: Stored(tuple(shape), one.dtype)}

    def read(self, name: str, part: Part = ()) -> Tensor:
        """The tensor or that part of it, from the pieces that it touches."""
        axis = self.shared.axis
        cuts = [*part, *(slice(None) for _ in range(axis + 1 - len(part)))]
        start, stop, _ = cuts[axis].indices(self.shared.size)
        return self.positions([(start, stop)], cuts)

    def positions(self, ranges: Iterable[Range], others: Sequence[slice] = (), group: int | None = None) -> Tensor:
        """Those ranges of the whole, side by side; `others` are the slices of the other axes.

        `group`: how many positions a scale is wanted for; one that stands for all of a piece is repeated.
        """
        axis = self.shared.axis
        cuts = [*others, *(slice(None) for _ in range(axis + 1 - len(others)))]
        parts = []
        runs = [run for start, stop in ranges for run in self.layout.part(start, stop)]
        for run in runs:
            cuts[axis] = self._columns(run)
            part = self.files[run.rank].read(self.name, tuple(cuts))
            if group and self._is_of_row(run):
                part = part.repeat_interleave((run.stop - run.start) // group, dim=axis)
            parts.append(part)
        if not parts:
            cuts[axis] = slice(0, 0)
            return next(iter(self.files.values())).read(self.name, tuple(cuts))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)

    def _is_of_row(self, run: Run) -> bool:
        """Whether a piece has one scale for all of its positions."""
        return self.files[run.rank].stored[self.name].shape[self.shared.axis] == 1 and self.shared.length(run.rank) > 1

    def _columns(self, run: Run) -> slice:
        """Where a run of positions lies in the piece as it is stored."""
        stored, length = self.files[run.rank].stored[self.name].shape[self.shared.axis], self.shared.length(run.rank)
        if self._is_of_row(run):
            return slice(0, 1)
        if run.start * stored % length or run.stop * stored % length:
            raise CheckpointError(
                f"{self.files[run.rank].path}: {self.name}: positions {run.start} to {run.stop} of {length} "
                f"cut one of the {stored} columns that are stored"
            )
        return slice(run.start * stored // length, run.stop * stored // length)


@dataclass(frozen=True)
class Values:
    """A quantized matrix as the values in `dtype` that it stands for, as a file that holds them: [outputs, inputs], or
    `transposed`.
    """

    name: str
    parts: Mapping[str, TensorFile]  # data, scale, zero
    shape: tuple[int, int]
    format: QuantFormat
    transposed: bool
    dtype: torch.dtype
    bytes_read = 0  # the files themselves count

    @property
    def path(self) -> Path:
        return self.parts["data"].path

    @property
    def stored(self) -> dict[str, Stored]:
        return {self.name: Stored(self.shape[::-1] if self.transposed else self.shape, self.dtype)}

    def read(self, name: str, part: Part = ()) -> Tensor:
        """The values or that part of them: of the rows that it touches."""
        both = (*part, slice(None), slice(None))[:2]
        outputs, inputs = both[::-1] if self.transposed else both
        held = {leaf: self._rows(leaf, outputs) for leaf in self.parts}
        weight = QuantizedWeight(
            held["data"], held["scale"], held.get("zero"), (len(held["data"]), self.shape[1]), self.format
        )
        values = self.format.dequantize(weight, self.dtype)[:, inputs]
        return values.t() if self.transposed else values

    def _rows(self, leaf: str, rows: slice) -> Tensor:
        file, name = self.parts[leaf], f"{self.name.removesuffix('weight')}{leaf}"
        if not isinstance(file, Joined) or file.shared.axis == 0 or leaf == "data":
            return file.read(name, (rows,))
        group = self.format.group_size or math.gcd(
            *(run.stop - run.start for run in file.layout.runs)
        )  # pieces with a scale for each row
        return file.positions([(0, self.shape[1])], (rows,), group)


class SavedShards(Checkpoint):
    """The files of all ranks, or of `rank` alone: the others' are opened if something of them is asked for."""

    def __init__(self, files: Files, shared: Mapping[str, Shared], checksums: Sequence[Checksums], rank: int | None):
        self.form, self.version, self.pieces, self.told = files.form, None, {}, True
        (paths,) = files.groups
        self._opened = _Opened(paths, checksums)
        opened = {number: self._opened[number] for number in range(len(paths)) if rank in (None, number)}
        layouts = {one: one.layout(rank or 0) for one in dict.fromkeys(shared.values())}
        for name in dict.fromkeys(name for file in opened.values() for name in file.stored):
            found = {number: file for number, file in opened.items() if name in file.stored}
            cut = shared.get(name) or shared.get(_weight_of(name))
            if cut is None:
                self.pieces[name] = Pieces(name, (next(iter(found.values())),))
                continue
            self.pieces[name] = Pieces(name, (Joined(name, self._opened, cut, layouts[cut]),))
            if len(found) < len(opened):
                without = ", ".join(str(file.path) for number, file in opened.items() if number not in found)
                raise CheckpointError(f"{name} is missing in {without}")
            for number, one in found.items():
                if cut.axis >= len(one.stored[name].shape):
                    raise CheckpointError(
                        f"{one.path}: {name} is {one.stored[name].shape}, and the index cuts it on axis {cut.axis}"
                    )
                if name in shared and one.stored[name].shape[cut.axis] != cut.length(number):
                    raise CheckpointError(
                        f"{one.path}: {name} is {one.stored[name].shape}, and the index gives this rank "
                        f"{cut.length(number)} of {cut.size} on axis {cut.axis}"
                    )

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_read for file in self._opened.values())

    def part(self, name: str, cut: Cut | None, group: int | None = None) -> Tensor | None:
        """A tensor of that name as it is stored, or a rank's part of it, with a scale for each `group`; None where
        there is none.
        """
        pieces = self.pieces.get(name)
        if pieces is None:
            return None
        file = pieces.files[0]
        if not isinstance(file, Joined) and cut is None:
            return file.read(name)
        if isinstance(file, Joined):
            joined = file
        else:
            assert cut is not None
            whole = alone(cut.axis, sum(cut.sizes))
            joined = Joined(name, {0: file}, whole, whole.layout())
        shared = joined.shared
        assert cut is None or (cut.axis, sum(cut.sizes)) == (shared.axis, shared.size), (name, cut, shared)
        return joined.positions(cut.ranges if cut else [(0, shared.size)], group=group if shared.axis else None)

    def add_values(
        self, name: str, shape: tuple[int, int], format: str, transposed: bool, dtype: torch.dtype
    ) -> list[str]:
        """Have the quantized matrix `name` as values too; the names of what it is stored as."""
        stored = {leaf: f"{name.removesuffix('weight')}{leaf}" for leaf in _OF_WEIGHTS}
        found = {leaf: self.pieces[other].files[0] for leaf, other in stored.items() if other in self.pieces}
        self.pieces[name] = Pieces(name, (Values(name, found, shape, quant_format(format), transposed, dtype),))
        return list(stored.values())

    def fault(self, name: str, cut: Cut | None, wanted: tuple[int, ...], dtype: torch.dtype | None) -> str | None:
        """Why what is stored of `name` does not make up a tensor of shape `wanted` in `dtype` (None: any floating);
        None where it does.
        """
        if name not in self.pieces:
            return f"missing  {name}"
        file = self.pieces[name].files[0]
        files = file.files if isinstance(file, Joined) else {0: file}
        shared = file.shared if isinstance(file, Joined) else alone(cut.axis, sum(cut.sizes)) if cut else None
        if shared and cut and (shared.axis, shared.size) != (cut.axis, sum(cut.sizes)):
            return f"misshaped  {name}: {shared.size} on axis {shared.axis}, the model has {sum(cut.sizes)} on axis {cut.axis}"
        for rank, one in files.items():
            shape, found = one.stored[name].shape, one.stored[name].dtype
            if found != dtype if dtype else not found.is_floating_point:
                return f"misshaped  {name}: {found}, the model has {dtype or 'floating values'}"
            if shared is None:
                like = shape == wanted
            else:
                axis, own = shared.axis, cut.length if cut else shared.size
                like = len(shape) == len(wanted) and _without(shape, axis) == _without(wanted, axis)
                like = like and (shape[axis] * own == wanted[axis] * shared.length(rank) or shape[axis] == 1)
            if not like:
                return f"misshaped  {name}: {shape}, the model has {wanted}"
        return None


def _weight_of(name: str) -> str:
    owner, _, leaf = name.rpartition(".")
    return f"{owner}.weight" if leaf in _OF_WEIGHTS else name


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]
