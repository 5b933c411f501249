"""The index of our own shards, infuse.json: the executed plan and the contents of each rank's file.

It is validated as a whole before any file that it names is opened.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from infuse.config.quant import Quant
from infuse.config.values import Format, parse_dtype, parse_format
from infuse.ground.errors import CheckpointError
from infuse.parallel.slices import Band, Cut, Range, bands_of
from infuse.weights.sources import SAVED, inside, read_json

FORMAT = "infuse-5"
SEAL = "sha256"  # key of the checksum over the rest of the index


def seal(index: Mapping[str, Any]) -> str:
    """Checksum of an index, independent of key order and spacing."""
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def cut_text(cut: Cut) -> str:
    """Format a rank's part of a tensor for the index: "axis 0 of 96: 0:24 48:60", in positions of the whole.

    A cut of both axes has its rows at the end: "axis 1 of 64: 0:32, rows 0:48".
    """
    ranges = " ".join(f"{start}:{stop}" for start, stop in cut.ranges)
    rows = "" if cut.rows is None else f", rows {cut.rows[0]}:{cut.rows[1]}"
    return f"axis {cut.axis} of {cut.whole_length}: {ranges}{rows}"


def checksums_text(checksums: tuple[int, ...]) -> str:
    return " ".join(f"{value:08x}" for value in checksums)


def _cut(text: Any) -> Cut:
    head, _, parts = str(text).partition(": ")
    ranges, _, rows = parts.partition(", rows ")
    axis, length = (int(number) for number in head.removeprefix("axis ").split(" of "))
    cut = Cut(axis, _ranges(ranges), (length,), *_ranges(rows))
    if axis < 0 or (rows and axis == 0) or not all(0 <= start < stop <= length for start, stop in cut.ranges):
        raise ValueError(f"no part of {length} positions on axis {axis}: {ranges}")
    return cut


def _ranges(text: str) -> tuple[Range, ...]:
    pairs = (pair.split(":") for pair in text.split())
    return tuple((int(start), int(stop)) for start, stop in pairs)


def _checksums(text: Any) -> tuple[int, ...]:
    return tuple(int(value, 16) for value in str(text).split())


def _floating(value: Any) -> torch.dtype:
    dtype = parse_dtype(value)
    if not dtype.is_floating_point:
        raise ValueError("possible: a floating dtype")
    return dtype


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class SavedStep(_Record):
    """An executed step: a digest of the meaning of its tensors, and the format of each matrix.

    `layouts`: kernel layouts of matrices stored for memory mapping. `ordered`: the matrices in act-order.
    """

    kind: str
    formats: dict[str, Annotated[str, BeforeValidator(parse_format)]]
    layouts: dict[str, str] = {}
    ordered: tuple[str, ...] = ()


class SavedFile(_Record):
    """A rank's file: its cut of each tensor that ranks split, and the checksums of all its tensors."""

    name: str
    cuts: dict[str, Annotated[Cut, BeforeValidator(_cut)]]
    checksums: dict[str, Annotated[tuple[int, ...], BeforeValidator(_checksums)]]


class SavedIndex(_Record):
    """The contents of the index: the executed `steps` by path, and one file per rank.

    `interpretations` names the proven interpretation of each layer without a spec that ranks split. `stored`: formats
    of the checkpoint that the plan was made for. `orders`: the digests of its orders of inputs.
    """

    format: str
    model: str
    dtype: Annotated[torch.dtype, BeforeValidator(_floating)]
    format_of_weights: Format
    quant: Quant
    steps: dict[str, SavedStep]
    interpretations: dict[str, tuple[str, ...]]
    files: Annotated[tuple[SavedFile, ...], Field(min_length=1)]
    stored: dict[str, Annotated[str, BeforeValidator(parse_format)]] = {}
    orders: dict[str, str] = {}

    @property
    def layouts(self) -> dict[str, str]:
        """Path of an expert matrix → kernel layout that it is stored in."""
        return {
            f"{path}.{target.rpartition('.')[0]}": layout
            for path, step in self.steps.items()
            for target, layout in step.layouts.items()
        }

    @property
    def tp_size(self) -> int:
        return len(self.files)

    @property
    def coded(self) -> frozenset[str]:
        """Paths of the matrices that are stored in a number format."""
        targets = (f"{path}.{target}" for path, step in self.steps.items() for target in step.formats)
        return frozenset(target.rpartition(".")[0] for target in targets)

    @cached_property
    def bands(self) -> dict[str, tuple[Band, ...]]:
        """How the ranks' parts form each tensor that they split. Some biases are on one rank only."""
        bands = {}
        for name in dict.fromkeys(name for file in self.files for name in file.cuts):
            try:
                bands[name] = bands_of([file.cuts.get(name) for file in self.files])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        return bands

    @model_validator(mode="after")
    def _files_make_up_the_tensors(self) -> SavedIndex:
        if len({file.name for file in self.files}) < len(self.files):
            raise ValueError("a file stands twice")
        _ = self.bands  # raises ValueError if the parts do not form a tensor
        return self


def read_index(folder: Path) -> SavedIndex | None:
    """Read the index of our shards in `folder`; None if there is none; CheckpointError if it cannot be read."""
    path = folder / SAVED
    if not os.path.isfile(path):
        return None
    told = read_json(path)
    version = told.get("format") if isinstance(told, dict) else None
    if version != FORMAT:
        raise CheckpointError(
            f"{path}: not an index of this version: its format is {version!r:.40}, {FORMAT} is read; shard the model "
            "again from its original checkpoint"
        )
    if told.pop(SEAL, None) != seal(told):
        raise CheckpointError(
            f"{path}: was changed after it was written: its checksum differs; copy it again, or shard the model again"
        )
    try:
        index = SavedIndex.model_validate(told)
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors(include_url=False))
        raise CheckpointError(f"{path}: corrupt: {'; '.join(problems)}") from error
    for file in index.files:
        inside(folder, file.name, path)
    return index
