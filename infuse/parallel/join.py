"""Find the ranks that hold the model: given groups, an mpu, or a number of ranks of torch.distributed's world."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from infuse.ground.errors import ConfigError
from infuse.parallel.dense import with_dense
from infuse.parallel.group import LOCAL, Group, make_group
from infuse.parallel.mesh import ONE, Mesh

_SLICES, _EXPERTS = "tensor_parallel.tp_group", "moe.ep_group"


@dataclass(frozen=True)
class AskedRanks:
    """The ranks that a configuration asks for: numbers, or torch.distributed groups and a Megatron-like `mpu`.

    The ranks of `tp_group` or `ep_mp_group` slice each layer and the width of each expert, those of `ep_group` have
    whole experts.
    """

    tp_size: int = 1
    ep_size: int = 1
    mpu: Any = None
    tp_group: Any = None
    ep_group: Any = None
    ep_mp_group: Any = None

    @property
    def slices(self) -> bool:
        """Whether more than one rank may slice the layers."""
        return self.tp_size > 1 or any(group is not None for group in (self.mpu, self.tp_group, self.ep_mp_group))

    @property
    def slicing(self) -> Any:
        """The group whose ranks slice layers and experts; None if there is only their number."""
        if self.mpu is not None:
            return self.mpu.get_model_parallel_group()
        return self.ep_mp_group if self.tp_group is None else self.tp_group

    def mesh(self, world: int | None = None) -> Mesh:
        """Rank 0's mesh. ConfigError if the ranks do not fit into a `world` of so many (None: as many as needed).

        The experts' ranks are among those that slice the layers if the world is too small for both.
        """
        tp, ep = self.tp_size, self.ep_size
        if world is None or world % (tp * ep) == 0:
            return Mesh(tp=tp, ep=ep)
        if ep > world:
            raise ConfigError(
                f"moe.ep_size: found {ep}, more than the world of {world} ranks; possible: up to {world}, or "
                f"{_start(tp * ep)}"
            )
        if ep == 1:
            raise ConfigError(
                f"tensor_parallel.tp_size: found {tp}, which does not divide the world of {world} ranks; {_start(tp)}"
            )
        if world % tp == 0 and tp % ep == 0:
            return Mesh(tp=tp, ep=ep, within=True)
        raise ConfigError(
            f"moe.ep_size: found {ep} and tensor_parallel.tp_size {tp}, and a world of {world} ranks, which is no "
            f"multiple of {tp * ep}; possible: {_start(tp * ep)}, or sizes that divide {world}, ep_size also tp_size"
        )


def join(asked: AskedRanks, device: torch.device, timeout_s: float) -> tuple[Mesh, Group]:
    """This rank's mesh and group; all ranks call it together.

    Without given groups, the ranks are neighbours of the world. If there is no world yet, it is made from torchrun's
    environment; a world of several times as many ranks holds replicas of the model. Raises ConfigError if numbers and
    groups contradict each other, or there is no world.
    """
    if asked.slicing is None and asked.ep_group is None:
        if asked.tp_size * asked.ep_size == 1:
            return ONE, LOCAL
        mesh, process_group = _neighbours(asked, device)
    else:
        mesh, process_group = _given(asked, timeout_s)
    group = make_group(process_group, timeout_s=timeout_s)
    mesh = mesh.at(group.rank)
    return mesh, with_dense(group, mesh)


def _neighbours(asked: AskedRanks, device: torch.device) -> tuple[Mesh, Any]:
    """The mesh of this rank and its neighbours, and their torch.distributed group, None for the whole world."""
    key, size = "tensor_parallel.tp_size", asked.tp_size
    if asked.ep_size > 1:
        key, size = "moe.ep_size", asked.tp_size * asked.ep_size
    if not dist.is_available():
        raise ConfigError(f"{key}: this PyTorch is built without torch.distributed")
    if not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            asked_size = asked.ep_size if asked.ep_size > 1 else asked.tp_size
            raise ConfigError(f"{key}: found {asked_size}, but this process is alone; {_start(size)}")
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    world = dist.get_world_size()
    mesh = asked.mesh(world)
    if world == mesh.size:
        return mesh, None
    # Every rank must create every group.
    groups = [dist.new_group(list(range(first, first + mesh.size))) for first in range(0, world, mesh.size)]
    return mesh, groups[dist.get_rank() // mesh.size]


def _given(asked: AskedRanks, timeout_s: float) -> tuple[Mesh, Any]:
    """The mesh of the given groups' ranks, and the group of all of them."""
    slicing, experts = asked.slicing, asked.ep_group
    mine = _members(slicing, _SLICES, "tensor_parallel.tp_size", asked.tp_size)
    if asked.mpu is not None or asked.tp_group is not None:
        _check_ep_mp_group(asked, mine)
    if experts is None:
        if asked.ep_size > 1 and len(mine) % asked.ep_size:
            raise ConfigError(
                f"moe.ep_size: found {asked.ep_size}, which does not divide the {len(mine)} ranks of the group given "
                "for slices; give moe.ep_group too"
            )
        return Mesh(tp=len(mine), ep=asked.ep_size, within=asked.ep_size > 1), slicing
    theirs = _members(experts, _EXPERTS, "moe.ep_size", asked.ep_size)
    if slicing is None:
        if asked.tp_size > 1:
            raise ConfigError(
                f"moe.ep_group: given beside tensor_parallel.tp_size={asked.tp_size}; give tensor_parallel.tp_group too"
            )
        return Mesh(ep=len(theirs)), experts
    if set(theirs) <= set(mine):
        at = mine.index(theirs[0])
        if theirs != mine[at : at + len(theirs)] or at % len(theirs) or len(mine) % len(theirs):
            raise ConfigError(
                f"moe.ep_group: ranks {theirs} are no block of neighbours in the group given for slices, {mine}"
            )
        return Mesh(tp=len(mine), ep=len(theirs), within=len(theirs) > 1), slicing
    return _crossing(mine, experts, timeout_s)


def _crossing(mine: list[int], experts: Any, timeout_s: float) -> tuple[Mesh, Any]:
    """Return the mesh and a new group of a grid of ranks. `mine` is this rank's line, `experts` the crossing one."""
    others = make_group(experts, timeout_s=timeout_s, shared_memory=False)
    grid = others.numbers(mine, "exchange of the ranks that slice each expert")
    members = sorted(rank for line in grid for rank in line)
    for mesh in (Mesh(tp=len(mine), ep=len(grid), tp_first=tp_first) for tp_first in (False, True)):
        if all(members[rank.rank] == grid[rank.ep_rank][rank.tp_rank] for rank in mesh.ranks()):
            whole_world = len(members) == dist.get_world_size()
            return mesh, None if whole_world else dist.new_group(members, use_local_synchronization=True)
    raise ConfigError(
        f"moe.ep_group: with the groups given for slices its ranks form {grid}, which is no grid of ascending ranks"
    )


def _members(group: Any, key: str, size_key: str, size: int) -> list[int]:
    """The ranks of a given group in the world; ConfigError if this rank is not in it, or it has another size."""
    if group is None:
        return [dist.get_rank()] if dist.is_initialized() else [0]
    if dist.get_rank(group) < 0:
        raise ConfigError(f"{key}: this rank is not in the given group")
    members = dist.get_process_group_ranks(group)
    if size not in (1, len(members)):
        raise ConfigError(f"{size_key}: found {size}; the given group has {len(members)} ranks: leave it out")
    return members


def _check_ep_mp_group(asked: AskedRanks, slicing: list[int]) -> None:
    """ConfigError if both groups for slices are given and have different ranks."""
    if asked.ep_mp_group is None:
        return
    ranks = dist.get_process_group_ranks(asked.ep_mp_group)
    if ranks != slicing:
        raise ConfigError(
            f"moe.ep_mp_group: has ranks {ranks}, tensor_parallel.tp_group has {slicing}: the same ranks slice layers "
            "and experts; give one of them"
        )


def _start(size: int) -> str:
    return f"start {size} ranks: torchrun --nproc-per-node {size} SCRIPT"
