"""Builds the C++ kernels where there is a C++20 compiler and PyTorch's headers; says so in one line where there is not.

The kernels use PyTorch's stable ABI only, so that one binary serves every torch from 2.10 on. `INFUSE_BUILD=0` skips them;
flags in `CXXFLAGS` come after those here, when compiling and when linking.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.extension import Extension

SOURCES = Path("infuse/ops/cpu/src")
FLAGS = ("-O3", "-std=c++20", "-fPIC", "-DNDEBUG", "-fno-math-errno", "-fvisibility=hidden", "-Wall")
# g++ 12 warns about the deliberate self-initialisation in its own AVX-512 headers.
QUIET = ("-Wno-maybe-uninitialized", "-Wno-uninitialized")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
LEVELS: dict[str, tuple[str, ...]] = {"generic": ()}
if platform.machine() in ("x86_64", "AMD64"):
    AVX512_BF16 = (*AVX512, "-mavx512bf16")
    AMX = (*AVX512_BF16, "-mamx-tile", "-mamx-bf16")
    LEVELS |= {"avx2": AVX2, "avx512": AVX512, "avx512_bf16": AVX512_BF16, "avx512_amx": AMX}
AMX_PROGRAM = 'void multiply() { __asm__("tdpbf16ps %tmm0, %tmm1, %tmm2"); }'
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # 2.10


def torch_root() -> Path | None:
    """The installed PyTorch, also seen from an isolated build: it lies in the environment that is being installed into."""
    for name in ("purelib", "platlib"):
        root = Path(sysconfig.get_paths()[name]) / "torch"
        if (root / "include/torch/csrc/stable/library.h").exists():
            return root
    return None


def knows_amx(compiler: str, folder: Path) -> bool:
    """Whether the compiler takes the flags of AMX and its assembler the instructions."""
    source = folder / "amx_program.cpp"
    source.write_text(AMX_PROGRAM)
    command = [compiler, *LEVELS["avx512_amx"], "-c", str(source), "-o", str(folder / "amx_program.o")]
    return subprocess.run(command, capture_output=True).returncode == 0


class BuildKernels(build_ext):
    """Compiles kernels.cpp once for each instruction set and links all into one library."""

    def run(self) -> None:
        compiler, torch = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++"), torch_root()
        missing = "INFUSE_BUILD=0" if os.environ.get("INFUSE_BUILD") == "0" else None
        missing = missing or (None if compiler else "no C++ compiler") or (None if torch else "no PyTorch >= 2.10 in this environment")
        if missing:
            print(f"infuse: the C++ kernels are not built ({missing}); PyTorch's own kernels are used")
            return
        try:
            self._build(str(compiler), Path(str(torch)))
        except subprocess.CalledProcessError as error:
            print(f"infuse: the C++ kernels are not built ({error.cmd[0]} failed:\n{error.stderr[-2000:]}); PyTorch's own kernels are used")

    def _build(self, compiler: str, torch: Path) -> None:
        given = shlex.split(os.environ.get("CXXFLAGS", ""))
        objects = Path(self.build_temp)
        objects.mkdir(parents=True, exist_ok=True)
        levels = dict(LEVELS)
        if "avx512_amx" in levels and not knows_amx(compiler, objects):
            del levels["avx512_amx"]
            print("infuse: the C++ kernels are built without AMX, which the compiler does not know")
        jobs = [
            ([f"-DINFUSE_ISA={level}", *flags], SOURCES / "kernels.cpp", objects / f"kernels_{level}.o") for level, flags in levels.items()
        ]
        jobs.append((["-DINFUSE_WITH_AMX"] if "avx512_amx" in levels else [], SOURCES / "detect.cpp", objects / "detect.o"))
        stable = [STABLE_ABI, f"-I{torch / 'include'}", "-include", str(SOURCES / "no_extern_templates.h")]
        for source in sorted(SOURCES.glob("binding*.cpp")):
            jobs.append((stable, source, objects / f"{source.stem}.o"))

        def compile_one(job: tuple) -> None:
            flags, source, target = job
            command = [compiler, *FLAGS, *QUIET, *flags, *given, "-c", str(source), "-o", str(target)]
            subprocess.run(command, check=True, capture_output=True, text=True)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, jobs))
        target = Path("infuse/ops/cpu") if self.inplace or self.editable_mode else Path(self.build_lib) / "infuse/ops/cpu"
        target.mkdir(parents=True, exist_ok=True)
        library = target / "_kernels.so"
        built = objects / "_kernels.so"
        command = [compiler, *given, "-shared", "-o", str(built), *(str(job[2]) for job in jobs), f"-L{torch / 'lib'}", "-ltorch_cpu"]
        subprocess.run(command, check=True, capture_output=True, text=True)
        library.unlink(missing_ok=True)  # a running process keeps the old one
        shutil.copy2(built, library)

    def get_outputs(self) -> list[str]:
        library = Path(self.build_lib) / "infuse/ops/cpu/_kernels.so"
        return [str(library)] if library.exists() else []

    def get_source_files(self) -> list[str]:
        return [str(path) for path in sorted(SOURCES.iterdir())]


class PlatformWheel(bdist_wheel):
    """One wheel of a platform for every Python: the binary is loaded by PyTorch and knows nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class BinaryDistribution(Distribution):
    """A distribution with a binary, so that wheels carry a platform tag."""

    def has_ext_modules(self) -> bool:
        return True


setup(
    ext_modules=[Extension("infuse.ops.cpu._kernels", sources=[])],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
    distclass=BinaryDistribution,
)
