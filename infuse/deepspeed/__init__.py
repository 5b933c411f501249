"""The drop-in face: after `import infuse.deepspeed as deepspeed` a DeepSpeed-Inference script runs unchanged.

Names and keyword names are DeepSpeed's; what they do is infuse's. Training is not here.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import sys
from datetime import timedelta
from typing import Any

import torch

from infuse.config.inference import InferenceConfig
from infuse.config.values import parse_dtype
from infuse.deepspeed import module_inject
from infuse.engine import InferenceEngine, init_inference
from infuse.errors import ConfigError

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

# So that `from infuse.deepspeed.module_inject import ...` works beside `infuse.deepspeed.module_inject`, as os does for
# os.path.
sys.modules[f"{__name__}.module_inject"] = module_inject

try:
    __version__ = importlib.metadata.version("infuse")
except importlib.metadata.PackageNotFoundError:  # used from a source tree that is not installed
    __version__ = "0.0.0"


def default_inference_config() -> dict[str, Any]:
    """A new dict with every key of the configuration and its default; init_inference takes it, changed or not."""
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
    """Initialises torch.distributed where RANK and WORLD_SIZE are set, or rank and world_size given; else does nothing.

    dist_backend None: nccl with a GPU, else gloo. timeout None: torch's. init_method None: MASTER_ADDR and MASTER_PORT,
    or localhost and `distributed_port`. dist_init_required=False, or a process group that exists: nothing is done.
    auto_mpi_discovery, verbose and config are accepted without effect. One of rank and world_size alone raises
    ConfigError.
    """
    if dist_init_required is False or not torch.distributed.is_available() or torch.distributed.is_initialized():
        return
    if (rank < 0) != (world_size < 0):
        raise ConfigError(
            f"rank, world_size: found {rank} and {world_size}; possible: both from 0 and 1 on, or neither"
        )
    if rank < 0:
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if init_method is None:
        init_method = "env://"  # which reads the launcher's own settings too
        if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
            port = os.environ.get("MASTER_PORT", str(distributed_port))
            init_method = f"tcp://{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{port}"
    backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    torch.distributed.init_process_group(
        backend, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size
    )


class OnDevice(contextlib.AbstractContextManager["OnDevice"]):
    """Within it, modules and tensors are created on `device` and, where floating, in `dtype`; both are restored after
    it.

    dtype as in the configuration; int8 creates in float16, the dtype that is quantized from. enabled=False: nothing
    changes.
    """

    def __init__(self, dtype: torch.dtype | str, device: torch.device | str = "meta", enabled: bool = True):
        try:
            self.dtype = parse_dtype(dtype)
        except ValueError as error:
            raise ConfigError(f"dtype: found {dtype!r}; {error}") from None
        self.device = device
        self.enabled = enabled
        self._undo: list[contextlib.ExitStack] = []  # one for each entry that was not left yet

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
    """The parser with --deepspeed and --deepspeed_config, and their old names; infuse reads none of them."""
    group = parser.add_argument_group("DeepSpeed", "accepted for the sake of scripts that pass them")
    for name in ("deepspeed", "deepscale"):
        group.add_argument(f"--{name}", action="store_true", help="a flag for the script's own use")
        group.add_argument(
            f"--{name}_config", default=None, type=str, help="a JSON file; give it to init_inference as config"
        )
    return parser
