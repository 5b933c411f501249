"""Triton's compiler without a GPU: kernels that a body launches on CPU tensors are compiled for a GPU and not run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction


class _NoDevice:
    """What the compiler asks a driver for."""

    def __init__(self, capability: int):
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> str:
        return "cpu"


@contextmanager
def compiled_for(capability: int) -> Iterator[list[Any]]:
    """Within it a launch compiles for sm_<capability> and computes nothing; the list takes the compiled kernels."""
    launch, found = JITFunction.run, []

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        found.append(kernel)
        return kernel

    driver.set_active(_NoDevice(capability))
    JITFunction.run = compile_only
    try:
        yield found
    finally:
        JITFunction.run = launch
        driver._active = None


@contextmanager
def front_end_alone() -> Iterator[None]:
    """Within it a kernel is compiled as far as Triton's own code goes, without LLVM and ptxas: a third of the time."""

    def stages_of(backend: Any = None, stages: Any = None, *_: Any) -> Any:
        if stages is None:  # the question for a key of Triton's cache
            return "front end", "front end"
        stages |= {"llir": no_memory, "ptx": lambda source, metadata: "", "cubin": lambda source, metadata: b""}

    def no_memory(source: Any, metadata: dict[str, Any]) -> str:
        sizes = ("shared", "tmem_size", "global_scratch_size", "profile_scratch_size")
        metadata.update(dict.fromkeys(sizes, 0), name="", global_scratch_align=1, profile_scratch_align=1)
        return ""

    before = knobs.runtime.add_stages_inspection_hook
    knobs.runtime.add_stages_inspection_hook = stages_of
    try:
        yield
    finally:
        knobs.runtime.add_stages_inspection_hook = before


def version() -> str:
    return triton.__version__
