"""Bodies in Triton for NVIDIA GPUs of compute capability 8.0 and newer.

The files here declare the bodies, those in kernels/ hold the kernels, so that Triton is imported only when a body first
runs. TRITON_INTERPRET=1 runs them on a CPU, for tests.
"""

from __future__ import annotations

import os
import shutil
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from infuse.ground.device import Device

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOWEST_CAPABILITY = 80  # Ampere introduced bfloat16 products and asynchronous copies


@cache
def kernels(name: str) -> Any:
    """The kernel module `name`, imported at the first call."""
    return import_module(f"infuse.ops.triton.kernels.{name}")


def needs(device: Device, dtype: torch.dtype) -> str | None:
    """Why the Triton bodies cannot run on `device` in `dtype`, or None."""
    if device.kind != "cuda":
        return f"the device is {device.kind}"
    if dtype not in DTYPES:
        return f"{dtype} is not one of {', '.join(str(d) for d in DTYPES)}"
    capability = next((int(feature[3:]) for feature in device.features if feature.startswith("sm_")), 0)
    if torch.version.hip is not None or capability < LOWEST_CAPABILITY:
        return f"{device.name} ({', '.join(device.features)}): Triton needs compute capability 8.0 or newer"
    return _missing()


@cache
def _missing() -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "triton finds no C compiler (CC, gcc or clang), which it needs to start kernels"
    return None
