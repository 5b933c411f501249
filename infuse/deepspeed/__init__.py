"""A drop-in for DeepSpeed: after `import infuse.deepspeed as deepspeed` a DeepSpeed-Inference script runs unchanged.

Names and keywords are DeepSpeed's, the behaviour is infuse's. There is no training.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
from datetime import timedelta
from typing import Any

import torch

from infuse.config.inference import InferenceConfig
from infuse.config.values import parse_dtype
from infuse.deepspeed import module_inject
from infuse.engine import InferenceEngine, init_inference
from infuse.ground.errors import ConfigError

__all__ = [
    "DeepSpeedInferenceConfig",
    "InferenceEngine",
    "OnDevice",
    "add_config_arguments",
    "default_inference_config",
    "init_distributed",
    "init_inference",
    "module_inject",
]

DeepSpeedInferenceConfig = InferenceConfig

try:
    __version__ = importlib.metadata.version("infuse")
except importlib.metadata.PackageNotFoundError:  # used from a source tree that is not installed
    __version__ = "0.0.0"


def default_inference_config() -> dict[str, Any]:
    """A new dict with every key of the configuration and its default, for init_inference."""
    return InferenceConfig().model_dump()


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Initialize torch.distributed if RANK and WORLD_SIZE are set, or rank and world_size given; else do nothing.

    dist_backend None: nccl with a GPU, else gloo. timeout None: torch's. init_method None: MASTER_ADDR and MASTER_PORT,
    or localhost and `distributed_port`. Does nothing with dist_init_required=False, or if a process group exists.
    auto_mpi_discovery, verbose and config have no effect. Raises ConfigError for one of rank and world_size alone.
    """
    if dist_init_required is False or not torch.distributed.is_available() or torch.distributed.is_initialized():
        return
    if (rank < 0) != (world_size < 0):
        numbers = f"{rank} and {world_size}"
        raise ConfigError(f"rank, world_size: found {numbers}; possible: both from 0 and 1 on, or neither")
    if rank < 0:
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if init_method is None and "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        init_method = "env://"  # reads the launcher's settings too
    elif init_method is None:
        host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", distributed_port)
        init_method = f"tcp://{host}:{port}"
    backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    torch.distributed.init_process_group(
        backend, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size
    )


class OnDevice(contextlib.AbstractContextManager["OnDevice"]):
    """Create modules and tensors inside the `with` on `device` and, if floating, in `dtype`.

    dtype is as in the configuration; int8 creates float16, which is quantized later. enabled=False changes nothing.
    """

    def __init__(self, dtype: torch.dtype | str, device: torch.device | str = "meta", enabled: bool = True):
        try:
            self.dtype = parse_dtype(dtype)
        except ValueError as error:
            raise ConfigError(f"dtype: found {dtype!r}; {error}") from None
        self.device = device
        self.enabled = enabled
        self._undo: list[contextlib.ExitStack] = []  # one for each nested `with`

    def __enter__(self) -> OnDevice:
        undo = contextlib.ExitStack()
        if self.enabled:
            undo.callback(torch.set_default_dtype, torch.get_default_dtype())
            undo.enter_context(torch.device(self.device))
            torch.set_default_dtype(torch.float16 if self.dtype == torch.int8 else self.dtype)
        self._undo.append(undo)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._undo.pop().close()


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed and --deepspeed_config, and their old names, to the parser. infuse reads none of them."""
    group = parser.add_argument_group("DeepSpeed", "accepted because scripts pass them")
    for name in ("deepspeed", "deepscale"):
        group.add_argument(f"--{name}", action="store_true", help="a flag for the script's own use")
        group.add_argument(f"--{name}_config", help="a JSON file; give it to init_inference as config")
    return parser
