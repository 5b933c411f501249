"""Builds the C++ kernels where there is a C++20 compiler and PyTorch is in the environment; says so in one line where
there is not.

Kernels that are missing after the installation are built when they are first used: infuse/native/first_use.py. How they
are compiled is in infuse/native/build.py for both. `INFUSE_BUILD=0` skips them.
"""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.extension import Extension

PACKAGE = "infuse/native"
# By its path: importing infuse would import PyTorch, which an isolated build does not have.
_spec = importlib.util.spec_from_file_location("build_kernels", Path(__file__).resolve().parent / PACKAGE / "build.py")
assert _spec is not None and _spec.loader is not None
kernels = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(kernels)


def torch_root() -> Path | None:
    """The PyTorch in the target environment, which an isolated build can see too; None if there is none."""
    roots = [Path(sysconfig.get_paths()[name]) / "torch" for name in ("purelib", "platlib")]
    return next((root for root in roots if (root / kernels.HEADER).exists()), None)


class BuildKernels(build_ext):
    """Compiles kernels.cpp once for each instruction set and links all into one library."""

    def run(self) -> None:
        torch = torch_root()
        target = Path(PACKAGE) if self.inplace or self.editable_mode else Path(self.build_lib) / PACKAGE
        if not (self.inplace or self.editable_mode):
            (target / "_kernels.so").unlink(missing_ok=True)  # of an earlier build, perhaps from other sources
        if missing := kernels.why_not(torch):
            print(f"infuse: the C++ kernels are not built now ({missing}), but at first use where there is a compiler")
            return
        objects = Path(self.build_temp)
        objects.mkdir(parents=True, exist_ok=True)
        try:
            unknown = kernels.compile_kernels(objects / "_kernels.so", objects, torch)
        except kernels.BuildError as error:
            if self.inplace:  # a developer's command; tests would go on with the kernels of earlier sources
                raise SystemExit(f"infuse: the C++ kernels do not build:\n{error}") from None
            print(f"infuse: the C++ kernels are not built: {str(error)[-2000:]}")
            return
        if unknown:
            print(f"infuse: the C++ kernels are built without {', '.join(unknown)}, which the compiler does not know")
        target.mkdir(parents=True, exist_ok=True)
        (target / "_kernels.so").unlink(missing_ok=True)  # a running process keeps the old one
        shutil.copy2(objects / "_kernels.so", target / "_kernels.so")

    def get_outputs(self) -> list[str]:
        library = Path(self.build_lib) / PACKAGE / "_kernels.so"
        return [str(library)] if library.exists() else []

    def get_source_files(self) -> list[str]:
        return [str(path) for path in sorted(Path("infuse/ops/cpu/src").iterdir())]


class PlatformWheel(bdist_wheel):
    """One wheel of a platform for every Python: the binary is loaded by PyTorch and knows nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class BinaryDistribution(Distribution):
    """A distribution with a binary, so that wheels carry a platform tag."""

    def has_ext_modules(self) -> bool:
        return True


setup(
    ext_modules=[Extension("infuse.native._kernels", sources=[])],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
    distclass=BinaryDistribution,
)
