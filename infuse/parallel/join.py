"""Which ranks share the model, from what the caller gives: a group, an mpu, or a number of ranks of torch.distributed's
world.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from infuse.errors import ConfigError, RankError
from infuse.parallel.group import LOCAL, Group, make_group
from infuse.parallel.mesh import ONE, Mesh


def join(tp_size: int, mpu: Any, process_group: Any, device: torch.device, timeout_s: float) -> tuple[Mesh, Group]:
    """This rank's mesh and group; all ranks call it together.

    `mpu` (get_model_parallel_group) or `process_group` bring the ranks. Else they are `tp_size` neighbours of the
    world, which torchrun's environment makes where nobody made it; a world of several times as many holds replicas of
    the model. ConfigError: the numbers contradict each other, or there is no world.
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
        raise ConfigError("tensor_parallel.tp_group: this rank is not in the group that was given")
    group = make_group(given, timeout_s=timeout_s)
    return Mesh(tp=group.size, tp_rank=group.rank), group


@contextmanager
def all_or_none(group: Group, what: str) -> Iterator[None]:
    """What all ranks do together: where one raises, the others hear why, as a RankError in the operation that they are
    in.
    """
    try:
        yield
    except RankError:
        raise
    except BaseException as error:  # an interrupt, too
        with suppress(RankError):  # all of them see that this is not what they do, this rank too
            group.barrier(f"{what} was given up by rank {group.rank}: {type(error).__name__}: {error}")
        raise


def _neighbours(tp_size: int, device: torch.device) -> Any:
    """The torch.distributed group of this rank and its neighbours; None is the whole world."""
    start = f"start {tp_size} ranks: torchrun --nproc-per-node {tp_size} SCRIPT"
    if not dist.is_available():
        raise ConfigError("tensor_parallel.tp_size: this PyTorch is built without torch.distributed")
    if not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise ConfigError(f"tensor_parallel.tp_size: found {tp_size}, and this process is alone; {start}")
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    world = dist.get_world_size()
    if world % tp_size:
        raise ConfigError(
            f"tensor_parallel.tp_size: found {tp_size} in a world of {world} ranks, which it does not divide; {start}"
        )
    if world == tp_size:
        return None
    rank, own = dist.get_rank(), None
    for first in range(0, world, tp_size):  # all ranks make all groups
        made = dist.new_group(list(range(first, first + tp_size)))
        own = made if first <= rank < first + tp_size else own
    return own
