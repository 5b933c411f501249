"""What a device can do: instruction sets, memory, dtypes. Detected on request, never at import."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

import torch
from torch import nn

from infuse.ground.errors import ConfigError

# The flags of /proc/cpuinfo that kernels use.
_CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")
_COMPUTE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Device:
    """A device. `memory_bytes` is its total memory; `features` are CPU flags or ("sm_90",)."""

    kind: str
    index: int | None
    name: str
    features: tuple[str, ...]
    memory_bytes: int
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, device: torch.device | str) -> Device:
        """Describe `device`; meta is described as the CPU, as plans need no weights. ConfigError if it is not there."""
        device = torch.device(device)
        if device.type == "cuda":
            return cls._cuda(device)
        if device.type in ("cpu", "meta"):
            memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
            return cls("cpu", None, platform.processor() or platform.machine(), cpu_features(), memory_bytes, _COMPUTE)
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:  # AssertionError: PyTorch was built without it
            raise ConfigError(f"device: {device} is not available here: {error}".partition("\n")[0]) from error
        return cls(device.type, device.index, device.type, (), 0, (torch.float32, torch.float16, torch.bfloat16))

    @classmethod
    def _cuda(cls, device: torch.device) -> Device:
        if not torch.cuda.is_available():
            built = "finds no NVIDIA GPU" if torch.version.cuda else "was built without CUDA"
            raise ConfigError(f"device: {device} is not available: torch {torch.__version__} {built}; possible: cpu")
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= torch.cuda.device_count():
            possible = ", ".join(f"cuda:{there}" for there in range(torch.cuda.device_count()))
            raise ConfigError(f"device: {device} is not available; possible: {possible}, cpu")
        properties = torch.cuda.get_device_properties(index)
        dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.float64)
        if properties.major >= 8:  # bfloat16 arithmetic came with Ampere
            dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
        features = (f"sm_{properties.major}{properties.minor}",)
        return cls("cuda", index, properties.name, features, properties.total_memory, dtypes)

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.kind) if self.index is None else torch.device(self.kind, self.index)

    @property
    def bfloat16_in_hardware(self) -> bool:
        """Whether bfloat16 products run in hardware: AVX512-BF16 or AMX on CPUs, Ampere and later on GPUs."""
        if self.kind == "cpu":
            return bool({"avx512_bf16", "amx_bf16"} & set(self.features))
        return torch.bfloat16 in self.dtypes

    @property
    def default_dtype(self) -> torch.dtype:
        """The dtype unless another is given: float16 on GPUs, as in DeepSpeed; on CPUs the hardware's best."""
        if self.kind != "cpu":
            return torch.float16
        return torch.bfloat16 if self.bfloat16_in_hardware else torch.float32


def device_of(*modules: nn.Module) -> torch.device:
    """The device of the first parameter of these modules, or else of the first buffer; the CPU without either."""
    tensors = (kind(module) for kind in (nn.Module.parameters, nn.Module.buffers) for module in modules)
    return next((tensor.device for tensor in chain.from_iterable(tensors)), torch.device("cpu"))


@cache
def cpu_features() -> tuple[str, ...]:
    """The instruction sets of this CPU that kernels use; empty if unknown."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ()
    line = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    flags = set(line.split())
    return tuple(flag for flag in _CPU_FLAGS if flag in flags)
