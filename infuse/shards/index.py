"""The index of our own shards, infuse.json, as a record: judged whole before a file that it names is opened."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from infuse.config.quant import Quant
from infuse.config.values import Format, parse_dtype, parse_format
from infuse.errors import CheckpointError
from infuse.shards.files import FORMAT, SEAL, checksums_from_text, seal
from infuse.weights.safetensors_file import Checksums
from infuse.weights.saved_shards import Shared, shared_tensors
from infuse.weights.sources import SAVED, inside, read_json


class SavedStep(BaseModel):
    """A step that was carried out: what its tensors mean, and the format of each matrix."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    path: str
    kind: str
    formats: dict[str, Annotated[str, BeforeValidator(parse_format)]]


def _by_path(steps: Any) -> dict[str, SavedStep]:
    found = {step.path: step for step in map(SavedStep.model_validate, steps)}
    if len(found) < len(steps):
        raise ValueError("a path stands twice")
    return found


def _floating(value: Any) -> torch.dtype:
    dtype = parse_dtype(value)
    if not dtype.is_floating_point:
        raise ValueError("possible: a floating dtype")
    return dtype


class SavedIndex(BaseModel):
    """What the index says. `steps` by their paths, `cuts` and `checksums` by tensors, the latter for each file."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)
    format: str
    model: str
    tp_size: Annotated[int, Field(ge=1)]
    files: tuple[str, ...]
    dtype: Annotated[torch.dtype, BeforeValidator(_floating)]
    format_of_weights: Format
    quant: Quant
    steps: Annotated[dict[str, SavedStep], BeforeValidator(_by_path)]
    readings: dict[str, tuple[str, ...]]
    cuts: Annotated[dict[str, Shared], BeforeValidator(shared_tensors)]
    checksums: Annotated[tuple[Checksums, ...], BeforeValidator(checksums_from_text)]

    @model_validator(mode="after")
    def _one_file_for_each_rank(self) -> SavedIndex:
        numbers = {
            len(set(self.files)),
            len(self.files),
            len(self.checksums),
            *(len(cut.ranks) for cut in self.cuts.values()),
        }
        if numbers != {self.tp_size}:
            raise ValueError(
                f"saved by {self.tp_size} ranks, and it names {len(self.files)} files, or parts of another number of ranks"
            )
        return self


def read_index(folder: Path) -> SavedIndex | None:
    """The index of our shards in `folder`, None where there is none; CheckpointError where it is not one that can be
    read.
    """
    path = folder / SAVED
    if not os.path.isfile(path):
        return None
    told = read_json(path)
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not an index of this version ({FORMAT}); shard the model again")
    if told.pop(SEAL, None) != seal(told):
        raise CheckpointError(
            f"{path}: was changed after it was written: its checksum differs; copy it again, or shard the model again"
        )
    try:
        index = SavedIndex.model_validate(told)
    except ValidationError as error:
        lines = (
            f"{'.'.join(str(part) for part in one['loc'])}: {one['msg']}" for one in error.errors(include_url=False)
        )
        raise CheckpointError(f"{path}: corrupt: {'; '.join(lines)}") from error
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:  # of texts and tables that are read before they are validated
        raise CheckpointError(f"{path}: corrupt: {type(error).__name__}: {error}") from error
    for name in index.files:
        inside(folder, name, path)
    return index
