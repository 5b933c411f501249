"""Checksums of weights, by which ranks verify that they got the same model.

All values of a live model are compared. For a checkpoint, each rank reads only its own part, so a sample of every
tensor is compared: `SAMPLED_ROWS` rows spread over the first axis, or all of a small tensor. Our own shards differ
between ranks, so their index is compared instead.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infuse.parallel.group import Group
from infuse.weights.lazy import LazyTensor
from infuse.weights.model_tensors import ModelTensors

SAMPLED_ROWS, SMALL_VALUES = 8, 1 << 12
_BLOCK = 1 << 12  # 8-byte words; summed per block first to limit memory
_OWN = ("transformers_version",)  # config keys that may differ between ranks


def agree_on_weights(group: Group, model: nn.Module, sums: Mapping[str, int]) -> None:
    """Raise RankError naming the first tensor that differs from rank 0's, or the config if that differs."""
    checksums = {f"the weights: {name}": value for name, value in sums.items()}
    group.check_same({"the names of the weights": "\n".join(checksums)}, "the names of the weights")
    config: Any = getattr(model, "config", None)
    values = _public(config.to_dict()) if hasattr(config, "to_dict") else {}
    config_sum = zlib.crc32(json.dumps(values, sort_keys=True, default=repr).encode())
    group.check_same({"the model's config": config_sum, **checksums}, "the weights")


def live_sums(model: nn.Module) -> dict[str, int]:
    """Checksum all values of each parameter and buffer; other tensor classes (quantized elsewhere) count by shape."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: int(_sum(tensor)) for name, tensor in tensors.items()}


def sampled_sums(source: ModelTensors) -> dict[str, int]:
    """Checksum sampled rows of each of the model's tensors in the checkpoint."""
    return {name: _sampled(source.tensors[name]) for name in sorted(source.tensors)}


def index_sum(path: Path) -> dict[str, int]:
    """Checksum the index of our shards."""
    return {path.name: zlib.crc32(path.read_bytes())}


def _sampled(tensor: LazyTensor) -> int:
    shape = tensor.shape
    if torch.Size(shape).numel() <= SMALL_VALUES:
        return int(_sum(tensor.read()))
    rows = max(SMALL_VALUES // SAMPLED_ROWS, 1) if len(shape) == 1 else 1
    starts = torch.linspace(0, max(shape[0] - rows, 0), SAMPLED_ROWS).long().unique().tolist()
    return sum(int(_sum(tensor.read((slice(start, start + rows),)))) for start in starts) & (1 << 62) - 1


def _sum(tensor: Tensor) -> Tensor:
    """Return an int64 that depends on every bit of a plain tensor and on the order of its blocks, not inside them."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta
    if not plain or not tensor.numel():
        return torch.tensor(zlib.crc32(f"{type(tensor).__name__} {tuple(tensor.shape)}".encode()))
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 8 or data.numel() % 8:
        data = F.pad(data, (0, -data.numel() % 8))
    words = data.view(torch.int64)
    whole = len(words) // _BLOCK * _BLOCK
    blocks = words[:whole].view(-1, _BLOCK).sum(dim=1)
    return _weighted(blocks) + 31 * _weighted(words[whole:])


def _weighted(values: Tensor) -> Tensor:
    """Sum all values, each weighted by a distinct odd number, with wraparound."""
    return (values * (2 * torch.arange(len(values), device=values.device) + 1)).sum()


def _public(value: Any) -> Any:
    """Drop private entries such as paths, which may differ between hosts."""
    if not isinstance(value, Mapping):
        return value
    entries = ((str(name), inner) for name, inner in value.items())
    return {name: _public(inner) for name, inner in entries if not name.startswith("_") and name not in _OWN}
