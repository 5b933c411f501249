"""Our own shards: the replaced model's tensors as they lie in memory, packed and quantized, and an index that reads back.

    infuse.json               what was replaced, in which formats and dtype, and the file of each rank
    rank-00-of-01.safetensors
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from infuse.errors import CheckpointError
from infuse.weights.safetensors_file import DTYPES
from infuse.weights.sources import SAVED

FORMAT = "infuse-1"
Progress = Callable[[int, int, str], None]
_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def rank_file(rank: int, size: int) -> str:
    return f"rank-{rank:02d}-of-{size:02d}.safetensors"


@dataclass(frozen=True)
class Bundle:
    """Tensors that come together: a quantized matrix is brought from its kernel's layout once for all of them."""

    names: tuple[str, ...]
    get: Callable[[], tuple[Tensor, ...]]


def write_shards(folder: Path, bundles: Sequence[Bundle], index: Mapping[str, Any], progress: Progress | None = None) -> None:
    """Write this rank's tensors and the `index` to `folder`, which is made. A file appears under its name when it is whole."""
    files = [rank_file(0, 1)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SAVED).unlink(missing_ok=True)  # until the new shards are there, there are none
        write_safetensors(folder / files[0], bundles, progress)
        text = json.dumps({"format": FORMAT, "tp_size": 1, "files": files, **index}, indent=1)
        _whole(folder / SAVED, lambda file: file.write(text.encode()))
    except OSError as error:
        raise CheckpointError(f"{folder}: the shards cannot be written: {error.strerror or error}") from error


def write_safetensors(path: Path, bundles: Sequence[Bundle], progress: Progress | None = None) -> None:
    """A safetensors file, bundle by bundle: no second copy of the model in memory."""
    places: dict[str, Any] = {}
    end = 0
    for bundle in bundles:
        for name, tensor in zip(bundle.names, bundle.get(), strict=True):
            places[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
            end += tensor.nbytes
    text = json.dumps(places, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def write(file: BinaryIO) -> None:
        file.write(len(text).to_bytes(8, "little") + text)
        for done, bundle in enumerate(bundles):
            for tensor in bundle.get():
                flat = tensor.detach().cpu().contiguous().reshape(-1)
                file.write(flat.view(torch.uint8).numpy().data)
            if progress:
                progress(done + 1, len(bundles), "saving")

    _whole(path, write)


def _whole(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """The file, written beside its place and moved there when nothing is missing."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "wb") as file:
            write(file)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
