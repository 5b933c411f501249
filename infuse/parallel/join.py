"""Find the ranks that share the model: a given group, an mpu, or a number of ranks of torch.distributed's world."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from infuse.errors import ConfigError
from infuse.parallel.group import LOCAL, Group, make_group
from infuse.parallel.mesh import ONE, Mesh


def join(tp_size: int, mpu: Any, process_group: Any, device: torch.device, timeout_s: float) -> tuple[Mesh, Group]:
    """This rank's mesh and group; all ranks call it together.

    The ranks are those of `mpu` (its get_model_parallel_group) or `process_group`, else `tp_size` neighbours of the
    world. If there is no world yet, it is made from torchrun's environment; a world of a multiple of `tp_size` holds
    replicas of the model. Raises ConfigError if the numbers contradict each other, or there is no world.
    """
    given = mpu.get_model_parallel_group() if mpu is not None else process_group
    if given is None and tp_size == 1:
        return ONE, LOCAL
    if given is None:
        given = _neighbours(tp_size, device)
    elif tp_size not in (1, size := dist.get_world_size(given)):
        raise ConfigError(
            f"tensor_parallel.tp_size: found {tp_size}; the given group has {size} ranks: leave tp_size out"
        )
    elif dist.get_rank(given) < 0:
        raise ConfigError("tensor_parallel.tp_group: this rank is not in the given group")
    group = make_group(given, timeout_s=timeout_s)
    return Mesh(tp=group.size, tp_rank=group.rank), group


def _neighbours(tp_size: int, device: torch.device) -> Any:
    """The torch.distributed group of this rank and its neighbours, or None for the whole world."""
    start = f"start {tp_size} ranks: torchrun --nproc-per-node {tp_size} SCRIPT"
    if not dist.is_available():
        raise ConfigError("tensor_parallel.tp_size: this PyTorch is built without torch.distributed")
    if not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise ConfigError(f"tensor_parallel.tp_size: found {tp_size}, but this process is alone; {start}")
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    world = dist.get_world_size()
    if world % tp_size:
        raise ConfigError(
            f"tensor_parallel.tp_size: found {tp_size}, which does not divide the world of {world} ranks; {start}"
        )
    if world == tp_size:
        return None
    # Every rank must create every group.
    groups = [dist.new_group(list(range(first, first + tp_size))) for first in range(0, world, tp_size)]
    return groups[dist.get_rank() // tp_size]
