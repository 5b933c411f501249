"""Write the files of our own shards: the replaced model's tensors as held in memory, and an index.

infuse.json                 the executed plan, the dtype, for each rank's file how its tensors were cut and their
                            checksums, and a checksum of the index itself
rank-00-of-02.safetensors   the tensors of rank 0, packed and quantized; those that ranks do not split are in every
rank-01-of-02.safetensors   file, so that a rank reads only its own
"""

from __future__ import annotations

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

from infuse.ground.errors import CheckpointError
from infuse.parallel.group import Group
from infuse.parallel.slices import Cut
from infuse.shards.index import FORMAT, SEAL, checksums_text, cut_text, seal
from infuse.weights.safetensors_file import DTYPES, SafetensorsFile, block_checksums, bytes_of
from infuse.weights.sources import SAVED

_RECORD = "infuse"  # key in each file's header for its entry in the index; rank 0 collects the entries
Progress = Callable[[int, int, str], None]
_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def rank_file(rank: int, size: int) -> str:
    return f"rank-{rank:02d}-of-{size:02d}.safetensors"


@dataclass(frozen=True)
class Bundle:
    """Tensors fetched together, so that a quantized matrix is converted from its kernel's layout only once."""

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
    """Write this rank's tensors, cut by `cuts`, to `folder`, which is created; rank 0 writes the `index` last.

    A file gets its final name only when complete. If one rank fails, all raise CheckpointError and no index is written.
    """
    names = [rank_file(rank, group.size) for rank in range(group.size)]
    with group.on_all_or_none("making the folder of the shards"), writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if group.rank == 0:
            (folder / SAVED).unlink(missing_ok=True)  # no valid shards until the new ones are complete
    with group.on_all_or_none("writing the shards"), writing(folder):
        write_safetensors(folder / names[group.rank], bundles, cuts, progress)
    with group.on_all_or_none("writing the index"), writing(folder):
        if group.rank == 0:  # reads the other ranks' files and verifies that they are complete
            records = (json.loads(SafetensorsFile(folder / name).metadata[_RECORD]) for name in names)
            files = [{"name": name, **record} for name, record in zip(names, records, strict=True)]
            whole = {"format": FORMAT, **index, "files": files}
            text = json.dumps({**whole, SEAL: seal(whole)}, indent=1)
            _write_whole(folder / SAVED, lambda file: file.write(text.encode()))


@contextmanager
def writing(folder: Path | str) -> Iterator[None]:
    """Raise errors of the file system as CheckpointError with the `folder`."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a zero byte or a lone surrogate in the name
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{folder}: the shards cannot be written: {reason}") from error


def write_safetensors(
    path: Path,
    bundles: Sequence[Bundle],
    cuts: Mapping[str, Cut] = MappingProxyType({}),
    progress: Progress | None = None,
) -> None:
    """Write a safetensors file bundle by bundle, without a second copy of the model in memory.

    Its header has the file's index entry: the rank's `cuts` and the checksums of each tensor.
    """
    places: dict[str, Any] = {}
    checksums: dict[str, str] = {}
    end = 0
    for bundle in bundles:
        for name, tensor in zip(bundle.names, bundle.get(), strict=True):
            offsets = [end, end + tensor.nbytes]
            places[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
            checksums[name] = checksums_text(block_checksums(_stored_bytes(tensor)))
            end += tensor.nbytes
    record = {"cuts": {name: cut_text(cut) for name, cut in cuts.items()}, "checksums": checksums}
    header = {"__metadata__": {_RECORD: json.dumps(record)}, **places}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * ((-len(text) - 8) % 64)  # aligns mapped tensors to cache lines

    def write(file: BinaryIO) -> None:
        file.write(len(text).to_bytes(8, "little") + text)
        for done, bundle in enumerate(bundles):
            for tensor in bundle.get():
                file.write(_stored_bytes(tensor))
            if progress:
                progress(done + 1, len(bundles), "saving")

    _write_whole(path, write)


def _stored_bytes(tensor: Tensor) -> memoryview:
    return bytes_of(tensor.detach().cpu().contiguous())


def _write_whole(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write to a temporary file in the same folder, and rename it when complete."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "wb") as file:
            write(file)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
