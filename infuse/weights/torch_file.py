"""One file that torch.save wrote (.bin, .pt): tensors by name, never code. Mapped where its format allows, so that parts can be read."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infuse.errors import CheckpointError
from infuse.weights.reader import Part, Stored

_INNER = ("module", "model", "state_dict")  # where training checkpoints have the model's own tensors
_MAPPED_BYTES = 1 << 24  # mapped pages that were read stay ours until the file is mapped anew, which takes about a millisecond


class TorchFile:
    """`stored` tells what is inside, `read` gets it. CheckpointError, with the path, for whatever cannot be read as tensors alone."""

    def __init__(self, path: Path):
        self.path, self.bytes_read, self._since = path, 0, 0
        self._tensors = self._open()
        self.stored = {name: Stored(tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors.items()}

    def read(self, name: str, part: Part = ()) -> Tensor:
        """The tensor or that part of it, in memory of its own."""
        if self._since > _MAPPED_BYTES and self._mapped:
            self._tensors, self._since = self._open(), 0
        found = self._tensors[name]
        tensor = (found[part] if part else found).clone(memory_format=torch.contiguous_format)
        self.bytes_read += tensor.nbytes
        self._since += tensor.nbytes
        return tensor

    def _open(self) -> dict[str, Tensor]:
        self._mapped = True
        try:
            with torch.serialization.safe_globals([argparse.Namespace]):  # the arguments that Megatron saves beside the model: data
                try:
                    loaded = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
                except RuntimeError as error:
                    if "mmap" not in str(error):
                        raise
                    self._mapped = False  # the format before torch 1.6 is one stream
                    loaded = torch.load(self.path, map_location="cpu", weights_only=True)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror or error}") from error
        except Exception as error:  # whatever a broken or a foreign file makes of torch.load
            reason = str(error).strip().partition("\n")[0]
            raise CheckpointError(f"{self.path}: truncated, corrupt, or not tensors alone (weights_only=True): {reason}") from error
        if not isinstance(loaded, Mapping):
            raise CheckpointError(f"{self.path}: holds a {type(loaded).__name__}; possible: a dict of tensors")
        inner = next((loaded[key] for key in _INNER if isinstance(loaded.get(key), Mapping)), loaded)
        return dict(_flat(inner))


def _flat(values: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Tensor]]:
    """Nested dicts as dotted names, as Megatron nests them; what is not a tensor is left out."""
    for key, value in values.items():
        if isinstance(value, Tensor):
            yield f"{at}{key}", value
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{at}{key}.")
