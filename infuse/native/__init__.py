"""The C++ kernels for CPUs: one binary for every instruction set and every torch >= 2.10.

It is built at install or at first use if there is a compiler; also where that of a checkout is of other sources than
these. Without it the other bodies run, and plans say so.
INFUSE_CPU_ISA=generic|avx2|avx512|avx512_bf16|avx512_amx selects a lower instruction set than the machine's. A trailing
! forces one that was not detected, for emulators. INFUSE_CPU_ISA=off disables these bodies.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from infuse.ground.device import Device
from infuse.native import build, first_use

BINARY = Path(__file__).with_name("_kernels.so")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Formats of quantized weights, in the order of `kFormats` in src/formats.h.
CODES = (
    "int8", "int4", "fp8", "fp6", "mxfp4", "nf4", "fp4", "q4_1", "q5_0", "q5_1", "iq4_nl", "q2_k", "q3_k", "q4_k",
    "q5_k", "q6_k", "iq4_xs", "nvfp4", "int2", "int3",
)  # fmt: skip


@cache
def kernels() -> Any:
    """The namespace of the compiled operators, or a text that says why there are none. Loads or builds them once."""
    if os.environ.get("INFUSE_CPU_ISA") == "off":
        return "INFUSE_CPU_ISA=off"
    binary = installed()
    unfit = f"{BINARY.name} was built from other sources than these" if BINARY.exists() else ""
    if binary is not None and not (unfit := _load(binary) or ""):
        return torch.ops.infuse_cpu
    library = first_use.obtain()  # also if the wheel's binary does not load: the system may be older than the wheel
    if isinstance(library, str):
        return f"{unfit}; {library}" if unfit else library
    return _load(library) or torch.ops.infuse_cpu


def installed() -> Path | None:
    """The library that came with the installation; None if there is none, or if it was built from other sources."""
    return BINARY if BINARY.exists() and build.is_of_sources(BINARY) else None


def library() -> Path | None:
    """The library that `kernels` loads; None if there is none yet."""
    return installed() or first_use.kept()


def _load(library: Path) -> str | None:
    """Load the operators; return None, or why they do not load."""
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        return f"the C++ kernels do not load: {error}".partition("\n")[0]
    return None


class Limits(NamedTuple):
    """The sizes at which the C++ bodies change their algorithm, defined in src/limits.h."""

    plain_rows: int  # most rows for which plain weights stream and a decoder layer runs in one call
    few_tokens: int  # most tokens of a sequence for which it does; their attention rounds as that of one token
    code_rows: int  # most rows for which quantized weights stream, for x in bfloat16
    code_rows_float: int  # the same for x in float32 and float16
    code_rows_integer: int  # the same for x rounded to 8 bits
    tiled_values: int  # most values of x in bfloat16 that tiles of plain weights multiply without an activation


@cache
def limits() -> Limits:
    """Call this only if there are kernels."""
    return Limits(*kernels().limits())


def needs(device: Device, dtype: torch.dtype) -> str | None:
    """Why the C++ bodies cannot run on `device` in `dtype`, or None."""
    if device.kind != "cpu":
        return f"the device is {device.kind}"
    if dtype not in DTYPES:
        return f"{dtype} is not one of {', '.join(str(d) for d in DTYPES)}"
    operators = kernels()
    return operators if isinstance(operators, str) else None


def isa() -> str | None:
    """The instruction set that the kernels use, or None without kernels."""
    return None if isinstance(kernels(), str) else _isa()


@cache
def _isa() -> str:
    return text_of(kernels().isa())


@cache
def step_words() -> frozenset[str]:
    """The words of the steps that held programs can have. Call this only if there are kernels."""
    return frozenset(text_of(kernels().step_words()).split())


def text_of(numbers: Sequence[int]) -> str:
    """The text whose bytes an operator returned: none takes or returns a string (src/binding.h)."""
    return bytes(numbers).decode()


def keeps_activations(device: Device, dtype: torch.dtype) -> str | None:
    """Why formats with :a8 do not round activations on `device`; None if they do, in products of many tokens."""
    if reason := needs(device, dtype):
        return reason
    if dtype is torch.bfloat16 and kernels().has_amx():
        return "AMX multiplies bfloat16 as fast"
    return None if str(isa()).startswith("avx512") else f"{isa()} has no products of bytes"


def described() -> dict[str, str]:
    """Describe the binary: instruction sets, the one in use and why no higher one, compiler; or why there is none.

    Builds nothing.
    """
    off = os.environ.get("INFUSE_CPU_ISA") == "off"
    path = library()
    operators = kernels() if off or path else first_use.outlook()
    if isinstance(operators, str):
        return {"C++ kernels": f"none: {operators}"}
    # One line per instruction set, highest first: its name, then why it cannot be used.
    levels = [line.partition(" ") for line in text_of(operators.levels()).splitlines()]
    names, runs = [name for name, _, _ in levels], text_of(operators.isa())
    compiler, torch_version = text_of(operators.compiler()), text_of(operators.torch_version())
    reasons = {
        "missing": "this CPU does not have it",
        "refused": "the system does not let this process use it",
        "unbuilt": "the compiler that built the kernels did not know it",
        "": f"INFUSE_CPU_ISA={os.environ.get('INFUSE_CPU_ISA')}",
    }
    return {
        "C++ kernels": f"{runs} runs, of {', '.join(name for name, _, reason in levels if reason != 'unbuilt')}",
        **{f"  not {name}": reasons[reason] for name, _, reason in levels[: names.index(runs)]},
        "  built by": f"{compiler} against torch {torch_version}, for torch 2.10 and later",
        "  from": str(path),
    }
