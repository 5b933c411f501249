"""Read one file written by torch.save (.bin, .pt): tensors by name, never code.

The file is memory-mapped if its format allows, so that parts can be read.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infuse.ground.errors import CheckpointError
from infuse.weights.lazy import Slices, Stored

_INNER = ("module", "model", "state_dict")  # keys under which training checkpoints keep the model's tensors
# Bytes read before the file is remapped: pages stay resident until then. Remapping takes about a millisecond.
_MAPPED_BYTES = 1 << 22


class TorchFile:
    """`stored` lists the tensors, `read` reads them. CheckpointError, with the path, if it holds more than tensors."""

    def __init__(self, path: Path):
        self.path, self.bytes_read, self._since = path, 0, 0
        self._tensors = self._open()
        self.stored = {name: Stored(tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors.items()}

    def read(self, name: str, part: Slices = ()) -> Tensor:
        """Read the tensor, or `part` of it, into its own memory."""
        if self._since > _MAPPED_BYTES and self._mapped:
            self._tensors, self._since = self._open(), 0
        source = self._tensors[name]
        tensor = (source[part] if part else source).clone(memory_format=torch.contiguous_format)
        self.bytes_read += tensor.nbytes
        self._since += tensor.nbytes
        return tensor

    def _open(self) -> dict[str, Tensor]:
        self._mapped = True
        try:
            # Megatron saves its arguments with the model, as an argparse.Namespace: plain data.
            with torch.serialization.safe_globals([argparse.Namespace]):
                try:
                    loaded = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
                except RuntimeError as error:
                    if "mmap" not in str(error):
                        raise
                    self._mapped = False  # the format before torch 1.6 is one stream and cannot be mapped
                    loaded = torch.load(self.path, map_location="cpu", weights_only=True)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror or error}") from error
        except Exception as error:  # torch.load may raise anything on a broken or foreign file
            reason = str(error).strip().partition("\n")[0]
            what = "truncated, corrupt, or not tensors alone (weights_only=True)"
            raise CheckpointError(f"{self.path}: {what}: {reason}") from error
        if not isinstance(loaded, Mapping):
            raise CheckpointError(f"{self.path}: holds a {type(loaded).__name__}; possible: a dict of tensors")
        inner = next((loaded[key] for key in _INNER if isinstance(loaded.get(key), Mapping)), loaded)
        try:
            return self._judged(list(_flat(inner)))
        except RecursionError as error:
            raise CheckpointError(f"{self.path}: its dicts are nested too deeply") from error

    def _judged(self, entries: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return the tensors by name; CheckpointError for duplicate names and for tensors without plain values."""
        tensors = dict(entries)
        if len(tensors) < len(entries):
            twice = [name for name, count in Counter(name for name, _ in entries).items() if count > 1]
            raise CheckpointError(f"{self.path}: names {', '.join(twice)} more than once")
        wrong = [f"{name} ({reason})" for name, tensor in entries if (reason := _not_plain(tensor))]
        if wrong:
            what = f"holds tensors that are not dense values: {', '.join(wrong)}"
            raise CheckpointError(f"{self.path}: {what}; save them with their values, dense and on a device")
        return {name: tensor.detach() for name, tensor in entries}


def _flat(values: Mapping[Any, Any], at: str = "") -> Iterator[tuple[str, Tensor]]:
    """Flatten nested dicts, as saved by Megatron, into dotted names; skip everything but tensors."""
    for key, value in values.items():
        if isinstance(value, Tensor):
            yield f"{at}{key}", value
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{at}{key}.")


def _not_plain(tensor: Tensor) -> str | None:
    """Return why a tensor has no plain values to read; None if it has."""
    if tensor.layout != torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        return type(tensor).__name__
    if tensor.is_quantized or tensor.is_nested:
        return "quantized" if tensor.is_quantized else "nested"
    return None if tensor.device.type == "cpu" else f"on {tensor.device}"
