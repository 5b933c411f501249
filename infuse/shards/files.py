"""Our own shards: the replaced model's tensors as they lie in memory, packed and quantized, and an index that reads
back.

infuse.json                 what was replaced, in which formats and dtype, the file of each rank, how each tensor was
cut, in which
                            reading ranks shared layers without a spec, the checksums of each tensor, and one of the
                            index itself
rank-00-of-02.safetensors   what rank 0 holds; what ranks do not share is in each file, so that a rank reads its own
alone rank-01-of-02.safetensors
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from infuse.errors import CheckpointError
from infuse.parallel.group import Group
from infuse.parallel.slices import Cut
from infuse.weights.safetensors_file import DTYPES, Checksums, SafetensorsFile, block_checksums, bytes_of
from infuse.weights.saved_shards import cuts_in_text, index_of_cuts
from infuse.weights.sources import SAVED

FORMAT = "infuse-2"
CUTS, CHECKSUMS = "infuse.cuts", "infuse.crc32"  # in the header of each rank's file; rank 0 gathers them from there
SEAL = "sha256"  # of all else in the index
Progress = Callable[[int, int, str], None]
_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def rank_file(rank: int, size: int) -> str:
    return f"rank-{rank:02d}-of-{size:02d}.safetensors"


@dataclass(frozen=True)
class Bundle:
    """Tensors that come together: a quantized matrix is brought from its kernel's layout once for all of them."""

    names: tuple[str, ...]
    get: Callable[[], tuple[Tensor, ...]]


def write_shards(
    folder: Path,
    bundles: Sequence[Bundle],
    cuts: Mapping[str, Cut],
    index: Mapping[str, Any],
    *,
    group: Group,
    progress: Progress | None = None,
) -> None:
    """Write this rank's tensors, which are cut by `cuts`, to `folder`, which is made; rank 0 writes the `index` when
    all are whole.

    A file appears under its name when it is whole. What fails on one rank is a CheckpointError on all, and then there
    is no index.
    """
    files = [rank_file(rank, group.size) for rank in range(group.size)]
    with group.on_all_or_none("making the folder of the shards"), _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if group.rank == 0:
            (folder / SAVED).unlink(missing_ok=True)  # until the new shards are there, there are none
    with group.on_all_or_none("writing the shards"), _writing(folder):
        write_safetensors(folder / files[group.rank], bundles, progress, {CUTS: cuts_in_text(cuts)})
    with group.on_all_or_none("writing the index"), _writing(folder):
        if group.rank == 0:  # which sees the others' files, and sees that they are whole
            told = [SafetensorsFile(folder / file).metadata for file in files]
            gathered = {
                "cuts": index_of_cuts([one[CUTS] for one in told]),
                "checksums": [json.loads(one[CHECKSUMS]) for one in told],
            }
            whole = {"format": FORMAT, "tp_size": group.size, "files": files, **index, **gathered}
            text = json.dumps({**whole, SEAL: seal(whole)}, indent=1)
            _whole(folder / SAVED, lambda file: file.write(text.encode()))


def seal(index: Mapping[str, Any]) -> str:
    """The checksum of an index, whatever the order and the spacing of its keys."""
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def checksums_from_text(files: Sequence[Mapping[str, str]]) -> tuple[Checksums, ...]:
    """The checksums of each file from the index; ValueError or AttributeError where it has others."""
    return tuple(
        {name: tuple(int(value, 16) for value in text.split()) for name, text in file.items()} for file in files
    )


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{folder}: the shards cannot be written: {error.strerror or error}") from error


def write_safetensors(
    path: Path,
    bundles: Sequence[Bundle],
    progress: Progress | None = None,
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """A safetensors file with a checksum of each tensor in its header, bundle by bundle: no second copy of the model in
    memory.
    """
    places: dict[str, Any] = {}
    checksums: dict[str, str] = {}
    end = 0
    for bundle in bundles:
        for name, tensor in zip(bundle.names, bundle.get(), strict=True):
            places[name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [end, end + tensor.nbytes],
            }
            checksums[name] = " ".join(f"{value:08x}" for value in block_checksums(_stored_bytes(tensor)))
            end += tensor.nbytes
    header = {"__metadata__": {**metadata, CHECKSUMS: json.dumps(checksums)}, **places}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def write(file: BinaryIO) -> None:
        file.write(len(text).to_bytes(8, "little") + text)
        for done, bundle in enumerate(bundles):
            for tensor in bundle.get():
                file.write(_stored_bytes(tensor))
            if progress:
                progress(done + 1, len(bundles), "saving")

    _whole(path, write)


def _stored_bytes(tensor: Tensor) -> memoryview:
    return bytes_of(tensor.detach().cpu().contiguous())


def _whole(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """The file, written beside its place and moved there when nothing is missing."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "wb") as file:
            write(file)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
