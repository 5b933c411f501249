"""Compile the C++ kernels once for each instruction set and link them into one library on PyTorch's stable ABI.

Imports only the standard library, because setup.py runs this file by its path, before infuse or PyTorch can be
imported. Flags in `CXXFLAGS` are appended when compiling and when linking.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).resolve().parent.parent / "ops" / "cpu" / "src"
FLAGS = ("-O3", "-std=c++20", "-fPIC", "-DNDEBUG", "-fno-math-errno", "-fvisibility=hidden", "-Wall")
# g++ 12 warns about the deliberate self-initialisation in its own AVX-512 headers.
QUIET = ("-Wno-maybe-uninitialized", "-Wno-uninitialized")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
LEVELS: dict[str, tuple[str, ...]] = {"generic": ()}
if platform.machine() in ("x86_64", "AMD64"):
    AVX512_BF16 = (*AVX512, "-mavx512bf16")
    AMX = (*AVX512_BF16, "-mamx-tile", "-mamx-bf16")
    # With -O3 the generic level takes twice as long to compile. x86-64 runs it only without AVX2 (before 2013).
    LEVELS |= {"generic": ("-O2",), "avx2": AVX2, "avx512": AVX512, "avx512_bf16": AVX512_BF16, "avx512_amx": AMX}
AMX_PROGRAM = 'void multiply() { __asm__("tdpbf16ps %tmm0, %tmm1, %tmm2"); }'
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # 2.10
HEADER = "include/torch/csrc/stable/library.h"  # exists in every PyTorch that the kernels can be built against


MARK = "infuse kernels of the sources "  # begins the text by which a library names them
CHECKOUT = Path(__file__).resolve().parents[2] / "setup.py"


class BuildError(Exception):
    """The compiler failed; the message is its output."""


def compiler() -> list[str] | None:
    """Return the command of the C++ compiler: CXX, g++ or clang++; None if there is none."""
    command = shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or shutil.which("clang++") or ""]
    return command if command[0] and shutil.which(command[0]) else None


def why_not(torch: Path | None) -> str | None:
    """Return why the kernels cannot be built against the PyTorch in the folder `torch`; None if they can."""
    if os.environ.get("INFUSE_BUILD") == "0":
        return "INFUSE_BUILD=0"
    if os.name != "posix":
        return f"they are built on Linux and macOS, this is {platform.system()}"
    if compiler() is None:
        if named := os.environ.get("CXX"):
            return f"CXX={named} is not a program"
        return "no C++ compiler: neither g++ nor clang++ is on PATH, and CXX is not set"
    if torch is None or not (torch / HEADER).exists():
        return "no PyTorch 2.10 or later in this environment"
    return None


def sources() -> str:
    """Hash of the sources and of how this file compiles them."""
    digest = hashlib.sha256()
    for path in (Path(__file__), *sorted(filter(Path.is_file, SOURCES.iterdir()))):
        digest.update(f"\n{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def fingerprint() -> str:
    """Hash of all that the built library depends on: sources, flags, machine. Not PyTorch, thanks to its stable ABI."""
    machine = f"{platform.system()} {platform.machine()} {os.environ.get('CXXFLAGS', '')} {sources()}"
    return hashlib.sha256(machine.encode()).hexdigest()[:16]


def is_of_sources(library: Path) -> bool:
    """Whether a library was built from these sources, which it names.

    In a checkout it may be of earlier ones, as after a `git pull`; a wheel has its own.
    """
    return not CHECKOUT.exists() or f"{MARK}{sources()}".encode() in library.read_bytes()


def compile_kernels(target: Path, objects: Path, torch: Path) -> list[str]:
    """Build the library `target` against the PyTorch in the folder `torch`; object files go to `objects`.

    Return the instruction sets that the compiler does not support. Raise BuildError if it fails.
    """
    command = compiler()
    assert command is not None
    extra_flags = shlex.split(os.environ.get("CXXFLAGS", ""))
    levels = dict(LEVELS)
    if "avx512_amx" in levels and not _knows_amx(command, objects):
        del levels["avx512_amx"]
    jobs = [
        ([f"-DINFUSE_ISA={level}", *flags], SOURCES / "kernels.cpp", objects / f"kernels_{level}.o")
        for level, flags in levels.items()
    ]
    jobs.append((["-DINFUSE_WITH_AMX"] if "avx512_amx" in levels else [], SOURCES / "detect.cpp", objects / "detect.o"))
    stable = [STABLE_ABI, f"-I{torch / 'include'}", "-include", str(SOURCES / "no_extern_templates.h")]
    stable.append(f'-DINFUSE_SOURCES="{MARK}{sources()}"')
    jobs += [(stable, source, objects / f"{source.stem}.o") for source in sorted(SOURCES.glob("binding*.cpp"))]

    def compile_one(job: tuple[list[str], Path, Path]) -> None:
        flags, source, into = job
        _run([*command, *FLAGS, *QUIET, *flags, *extra_flags, "-c", str(source), "-o", str(into)])

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(compile_one, jobs))
    made = [str(into) for _, _, into in jobs]
    _run([*command, *extra_flags, "-shared", "-o", str(target), *made, f"-L{torch / 'lib'}", "-ltorch_cpu"])
    return [level for level in LEVELS if level not in levels]


def _knows_amx(command: list[str], folder: Path) -> bool:
    """Whether the compiler and its assembler support AMX."""
    source = folder / "amx_program.cpp"
    source.write_text(AMX_PROGRAM)
    tried = [*command, *LEVELS["avx512_amx"], "-c", str(source), "-o", str(folder / "amx_program.o")]
    return subprocess.run(tried, capture_output=True).returncode == 0


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise BuildError(f"{command[0]} failed with exit code {done.returncode}:\n{done.stderr.strip()}")
