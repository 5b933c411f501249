"""Fresh Python processes for tests without the seconds that imports take: forked from one that has imported PyTorch,
transformers and infuse, and has started no thread and loaded no kernels.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch.distributed",
        "torch._dynamo",
        "transformers.models.llama.modeling_llama",
        "transformers.generation",
        "infuse.generate.install",
        "tests.models.families",
    ]
)
# Of the process that others are forked from: libraries read how many threads when they are loaded.
PATHS = filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")))
SETTINGS = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(PATHS)}


def start(target: Callable[..., Any], *args: Any, daemon: bool = True) -> BaseProcess:
    """A process that calls `target(*args)` and ends with this one. Only one that is no daemon may start others."""
    before = {name: os.environ.get(name) for name in SETTINGS}
    os.environ.update(SETTINGS)
    process = CONTEXT.Process(target=target, args=args, daemon=daemon)
    process.start()
    for name in SETTINGS:
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if value is not None})
    return process


class Program:
    """`python ARGUMENTS` in a folder, with these environment variables and no others; used like a subprocess.Popen.

    The arguments are `-c CODE`, `-m MODULE …` or `FILE …`. A program that is no daemon may fork others.
    """

    def __init__(self, *arguments: str, folder: Path, environment: Mapping[str, str], daemon: bool = True):
        self._outputs = tempfile.TemporaryDirectory()
        self._process = start(_run, self._outputs.name, arguments, str(folder), dict(environment), daemon=daemon)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it has printed to its standard output and error, once it has ended."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("the program", timeout or 0)
        out, err = (Path(self._outputs.name, name).read_text() for name in ("out", "err"))
        return out, err

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _run(outputs: str, arguments: tuple[str, ...], folder: str, environment: dict[str, str]) -> None:
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{outputs}/{name}", os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:0] = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    run_program(arguments)


def run_program(arguments: Sequence[str]) -> None:
    """What `python ARGUMENTS` runs, in this process."""
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    elif arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        runpy.run_path(arguments[0], run_name="__main__")
