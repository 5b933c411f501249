"""Models over several ranks: engines on each, how they meet, and how far they are from one process."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

import infuse
from tests.models.families import BY_NAME

TOLERANCE = 5e-5  # over the root mean square of the original's


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.square().mean().sqrt())


def engine_of(name: str, changes: dict | None = None, **keys: Any) -> infuse.InferenceEngine:
    tp = {"tp_size": dist.get_world_size()}
    given = {"dtype": "fp32", "progress": False, "verify": "off", "tensor_parallel": tp, **keys}
    return infuse.init_inference(BY_NAME[name].make(**(changes or {})), **given)


def meet_through(keeper: int) -> None:
    """Set up torch.distributed anew, with a store that a rank keeps."""
    rank, size, met = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.get_group_store()
    if rank == keeper:
        store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        met.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(met.get("port")), None, is_master=False, wait_for_workers=False)
    global kept  # as long as the process
    kept = met
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
