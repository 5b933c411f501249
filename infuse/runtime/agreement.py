"""Ranks that share a model are given the same, and keep the same graphs: checked by numbers before each forward and each generate."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from infuse.errors import RankError
from infuse.parallel.collectives import Group
from infuse.runtime.graph import modes


class Kept(Protocol):
    """Graphs that are kept from call to call."""

    def standing(self) -> Any:
        """What the next call depends on, beside its arguments: in words, the same on ranks that will do the same."""

    def fitting(self) -> int:
        """How many of the latest there is room for."""

    def keep(self, latest: int) -> None:
        """Only so many of the latest from now on."""

    def restart(self) -> None:
        """Forget everything."""


def agree_before(group: Group, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: all ranks are given the same."""
    agreed(group, "the inputs of forward", args, kwargs, getattr(vars(module).get("forward"), "graphs", None))


def agreed(group: Group, what: str, args: tuple, kwargs: Mapping[str, Any], kept: Kept | None = None) -> None:
    """RankError that names the ranks whose arguments are not rank 0's: by their checksums.

    Of what is `kept` all ranks keep what the one with the least room can; nothing where they have other things.
    """
    standing, fitting = (0, 0) if kept is None else (_checksum(repr(kept.standing())), kept.fitting())
    sums, standings, fits = zip(*group.numbers([_checksum((args, dict(kwargs), repr(modes()))), standing, fitting], what), strict=True)
    if others := [str(rank) for rank in range(group.size) if sums[rank] != sums[0]]:
        where = f"rank {group.rank} of {group.size}"
        raise RankError(f"{where}: {what} are others on rank {', '.join(others)} than on rank 0; give all ranks the same")
    if kept is not None and len(set(standings)) > 1:
        kept.restart()
    elif kept is not None:
        kept.keep(min(fits))


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
