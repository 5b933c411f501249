"""One file written by torch.save (.bin, .pt): tensors by name, never code. It is mapped if its format allows, so that
parts can be read.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infuse.errors import CheckpointError
from infuse.weights.reader import Part, Stored

_INNER = ("module", "model", "state_dict")  # where training checkpoints have the model's own tensors
# Pages that were read stay resident until the file is mapped anew, which takes about a millisecond.
_MAPPED_BYTES = 1 << 22


class TorchFile:
    """`stored` lists the tensors, `read` reads them. CheckpointError, with the path: it is not tensors alone."""

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
            with torch.serialization.safe_globals(
                [argparse.Namespace]
            ):  # the arguments that Megatron saves beside the model: data
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
            raise CheckpointError(
                f"{self.path}: truncated, corrupt, or not tensors alone (weights_only=True): {reason}"
            ) from error
        if not isinstance(loaded, Mapping):
            raise CheckpointError(f"{self.path}: holds a {type(loaded).__name__}; possible: a dict of tensors")
        inner = next((loaded[key] for key in _INNER if isinstance(loaded.get(key), Mapping)), loaded)
        try:
            return self._judged(list(_flat(inner)))
        except RecursionError as error:
            raise CheckpointError(f"{self.path}: its dicts are nested too deeply") from error

    def _judged(self, found: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """The tensors by name; CheckpointError for a name that stands twice and for tensors without plain values."""
        tensors = dict(found)
        if len(tensors) < len(found):
            twice = [name for name, count in Counter(name for name, _ in found).items() if count > 1]
            raise CheckpointError(f"{self.path}: names {', '.join(twice)} more than once")
        wrong = [f"{name} ({reason})" for name, tensor in found if (reason := _not_plain(tensor))]
        if wrong:
            raise CheckpointError(
                f"{self.path}: holds tensors that are not dense values: {', '.join(wrong)}; save them with "
                "their values, dense and on a device"
            )
        return {name: tensor.detach() for name, tensor in found}


def _flat(values: Mapping[Any, Any], at: str = "") -> Iterator[tuple[str, Tensor]]:
    """Nested dicts as dotted names, as Megatron nests them; what is not a tensor is left out."""
    for key, value in values.items():
        if isinstance(value, Tensor):
            yield f"{at}{key}", value
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{at}{key}.")


def _not_plain(tensor: Tensor) -> str | None:
    """Why a tensor has no plain values that can be read; None where it has."""
    if tensor.layout != torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        return type(tensor).__name__
    if tensor.is_quantized or tensor.is_nested:
        return "quantized" if tensor.is_quantized else "nested"
    return None if tensor.device.type == "cpu" else f"on {tensor.device}"
