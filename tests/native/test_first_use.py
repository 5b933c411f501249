"""An installation without kernels builds them when they are first used: once, for all processes, and says what it does.

A stand-in for the compiler, which copies the kernels of this checkout and counts its runs, makes that quick.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from infuse import native
from infuse.native import BINARY, build, first_use
from tests.support.stand_in_compiler import COMPILER, write_compiler

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(not BINARY.exists(), reason="the stand-in for the compiler copies the kernels of this checkout"),
    pytest.mark.skipif(os.name != "posix", reason="kernels are built on Linux and macOS"),
]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in, named by CXX, beside an empty cache; `kernels` asks anew before and after."""
    path = write_compiler(tmp_path / "compiler" / "c++")
    for name in ("INFUSE_BUILD", "INFUSE_CPU_ISA", "CXXFLAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CXX", str(path))
    monkeypatch.setenv("INFUSE_CACHE_DIR", str(tmp_path / "cache"))
    return path


def links(compiler: Path) -> int:
    """How many times a library was linked."""
    counted = compiler.with_name("linked")
    return len(counted.read_text()) if counted.exists() else 0


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A copy of the package without kernels."""
    shutil.copytree(
        ROOT / "infuse", tmp_path / "site" / "infuse", ignore=shutil.ignore_patterns("_kernels.so", "__pycache__")
    )
    return tmp_path / "site"


def start(installed: Path, code: str) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, "-c", code]
    return subprocess.Popen(
        command, env=environment, cwd=installed, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def end(process: subprocess.Popen) -> tuple[str, str]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out, err


USE = "from infuse import native; assert 'site' in native.__file__, cpu.__file__; print(native.isa())"


@pytest.mark.slow
def test_processes_that_start_together_build_once(compiler: Path, installed: Path) -> None:
    """Where there is a library that does not load, as a wheel's on a system that is older than it."""
    (installed / "infuse/native/_kernels.so").write_bytes(b"no library")
    told = [end(process) for process in [start(installed, USE) for _ in range(2)]]
    assert {out.strip() for out, _ in told} == {native.isa()}
    assert sum("building the C++ kernels" in err for _, err in told) == 1 and links(compiler) == 1


@pytest.mark.slow
def test_neither_the_import_nor_env_builds(compiler: Path, installed: Path) -> None:
    out, err = end(
        start(installed, "import sys, infuse; sys.argv = ['infuse', 'env']; from infuse_cli.app import app; app()")
    )
    assert not links(compiler) and "building" not in err
    assert "not built yet" in out and "stand-in" not in out and "infuse build" in " ".join(out.split())


def test_a_change_of_sources_or_flags_builds_anew(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = first_use.obtain()
    monkeypatch.setenv("CXXFLAGS", "-O0")
    assert first_use.kept() is None and first_use.obtain() != first and links(compiler) == 2


def test_a_failure_is_told_once_and_tried_again_when_something_changed(compiler: Path) -> None:
    broken = compiler.with_name("BROKEN")
    broken.touch()
    with pytest.warns(UserWarning, match="(?s)could not be built.*'concept' does not name a type"):
        why = first_use.obtain()
    assert isinstance(why, str) and "`infuse build` tries again" in why and "\n" not in why
    broken.unlink()
    # Without a warning; the compiler has the same name and version.
    assert first_use.obtain() == why == first_use.outlook()
    compiler.write_text(COMPILER.replace("stand-in 1.0", "stand-in 1.1"))
    assert isinstance(first_use.obtain(), Path)
    assert first_use.kept() is not None


@pytest.mark.slow
def test_infuse_build_builds_and_the_next_process_finds_it(compiler: Path, installed: Path) -> None:
    out, err = end(
        start(installed, "import sys; sys.argv = ['infuse', 'build']; from infuse_cli.app import app; app()")
    )
    assert "_kernels.so" in out and "building" in err and links(compiler) == 1
    assert end(start(installed, USE)) == (f"{native.isa()}\n", "") and links(compiler) == 1


@pytest.mark.slow
def test_infuse_build_tries_again(compiler: Path) -> None:
    compiler.with_name("BROKEN").touch()
    with pytest.warns(UserWarning):
        first_use.obtain()
    compiler.with_name("BROKEN").unlink()
    assert isinstance(first_use.obtain(), str) and isinstance(first_use.obtain(again=True), Path)
    assert isinstance(first_use.obtain(again=True), Path) and links(compiler) == 2


def test_reasons(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFUSE_BUILD", "0")
    assert first_use.obtain() == first_use.outlook() == "the C++ kernels are not built: INFUSE_BUILD=0"
    monkeypatch.delenv("INFUSE_BUILD")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "CXX=no-such-compiler is not a program" in str(first_use.obtain())
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "/nowhere")
    assert "neither g++ nor clang++ is on PATH" in str(first_use.obtain())


def test_a_home_that_cannot_be_written(compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary folder serves, if nobody else may write to ours in it."""
    monkeypatch.delenv("INFUSE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    monkeypatch.setattr(first_use.tempfile, "gettempdir", lambda: str(tmp_path))
    ours = tmp_path / f"infuse-{os.getuid()}"
    ours.mkdir()
    ours.chmod(0o777)  # as one that somebody else made for us
    why = first_use.obtain()
    assert isinstance(why, str)
    assert "other users may write there" in why
    assert "INFUSE_CACHE_DIR" in why
    assert not links(compiler)
    ours.chmod(0o700)
    found = first_use.obtain()
    assert isinstance(found, Path) and found.is_relative_to(ours) and first_use.kept() == found


def test_an_interrupted_build_leaves_nothing_behind(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(build, "compile_kernels", interrupted)
        first_use.obtain()
    assert first_use.kept() is None and isinstance(first_use.obtain(), Path)
    assert {path.name for path in Path(os.environ["INFUSE_CACHE_DIR"]).rglob("*") if path.is_file()} == {
        "lock",
        "_kernels.so",
    }


@pytest.mark.slow
def test_installed_without_pytorch_in_the_build(compiler: Path, tmp_path: Path) -> None:
    """As `pip install .` in a fresh environment: the wheel has the sources, and the first use builds them."""
    source = tmp_path / "source"
    shutil.copytree(
        ROOT / "infuse", source / "infuse", ignore=shutil.ignore_patterns("__pycache__")
    )  # with stale kernels in the tree
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    fresh = tmp_path / "fresh"
    venv.create(fresh, with_pip=False)
    python = fresh / "bin/python"
    packages = os.pathsep.join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    environment = os.environ | {
        "PYTHONPATH": packages
    }  # setuptools; PyTorch does not lie in the environment's own folders
    run = dict(env=environment, check=True, capture_output=True, cwd=tmp_path)
    subprocess.run([*pip, "install", "--no-index", "--no-build-isolation", "--no-deps", str(source)], **run)
    site = next(fresh.glob("lib/python*/site-packages/infuse"))
    assert not list(site.rglob("_kernels.so"))
    assert (site / "py.typed").exists()
    assert (site / "ops/cpu/src/kernels.cpp").exists()
    out = subprocess.run([python, "-c", USE.replace("'site'", "'fresh'")], **run).stdout
    assert out.decode().strip() == native.isa() and links(compiler) == 1
