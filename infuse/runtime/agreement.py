"""Ranks that share a model are given the same: checked by checksums before each forward and each generate."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from infuse.errors import RankError
from infuse.parallel.collectives import Group


def agree_before(group: Group, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: all ranks are given the same."""
    agreed(group, "the inputs of forward", args, kwargs)


def agreed(group: Group, what: str, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """RankError that names the ranks whose arguments are not rank 0's: by their checksums, one number for each rank."""
    mine = torch.tensor([_checksum((args, dict(kwargs)))])
    sums = group.all_gather(mine, [1] * group.size, 0, what).tolist()
    if others := [str(rank) for rank in range(group.size) if sums[rank] != sums[0]]:
        where = f"rank {group.rank} of {group.size}"
        raise RankError(f"{where}: {what} are others on rank {', '.join(others)} than on rank 0; give all ranks the same")


def _checksum(value: Any, seed: int = 0) -> int:
    """Of tensors on the CPU their values, of others their shape; of what is no plain value its class."""
    if isinstance(value, Tensor):
        seed = zlib.crc32(f"{value.dtype} {tuple(value.shape)}".encode(), seed)
        if value.device.type != "cpu":
            return seed
        return zlib.crc32(value.detach().contiguous().view(-1).view(torch.uint8).numpy().data, seed)
    if isinstance(value, Mapping):
        for key, inner in value.items():
            seed = _checksum(inner, zlib.crc32(str(key).encode(), seed))
        return seed
    if isinstance(value, (tuple, list)):
        for inner in value:
            seed = _checksum(inner, seed)
        return seed
    plain = isinstance(value, (bool, int, float, str, bytes, type(None)))
    return zlib.crc32(repr(value if plain else type(value)).encode(), seed)
