"""Several ranks for a command: torchrun's own launcher, called in this process, runs the command again as each of them.

Rank 0 prints; the others are silent. An error of one ends all, with one message.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from infuse.cli.model_folder import FAILED, LAUNCHED, WRONG_USE, fail, is_rank

INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def as_ranks(context: typer.Context, size: int | None) -> bool:
    """Whether this process is to do the command: as one alone, or as one of `size` ranks. False: ranks were started,
    and did it.

    An exit with a message where a rank failed, or on Ctrl-C.
    """
    if size is None or size == 1:
        return True
    if is_rank():
        _be_a_rank()
        return True
    _launch(size, [sys.executable, "-m", "infuse.cli.app", str(context.info_name), *_arguments(context)])
    return False


def rank_device(device: str | None) -> str | None:
    """The device of this rank: of several GPUs the one of its number on this host."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device


def _arguments(context: typer.Context) -> Iterator[str]:
    """The command's arguments as they would be written again."""
    positional = []
    for parameter in context.command.params:
        value = context.params.get(str(parameter.name))
        if parameter.param_type_name == "argument":
            positional.append(str(value))
        elif value is True:
            yield parameter.opts[0]
        elif value is not None and value is not False:
            yield f"{parameter.opts[0]}={value}"
    yield from ("--", *positional)


def _be_a_rank() -> None:
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher was told too; nobody needs this one's traceback
    if os.environ["RANK"] != "0":
        warnings.simplefilter("ignore")
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # until the process ends


def _launch(size: int, command: list[str]) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // size)))
    os.environ[LAUNCHED] = "1"
    logging.disable(logging.CRITICAL)  # the launcher tells each error once more, over a screen
    with tempfile.TemporaryDirectory(prefix="infuse-ranks-") as folder:
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=size, run_id=uuid.uuid4().hex, max_restarts=0, rdzv_backend="c10d",
            rdzv_endpoint="localhost:0", local_addr="localhost", logs_specs=DefaultLogsSpecs(log_dir=str(Path(folder, "log"))),
        )  # fmt: skip
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            _tell(error.failures)
        except SignalException as error:
            fail(f"ended by {error.sigval.name}; so are all ranks", INTERRUPTED)
        finally:
            logging.disable(logging.NOTSET)
            del os.environ[LAUNCHED]


def _tell(failures: dict[int, Any]) -> None:
    """One message and exit code for what became of the ranks: that of the one that failed first."""
    first = min(failures, key=lambda rank: (failures[rank].timestamp, rank))
    code = WRONG_USE if failures[first].exitcode == WRONG_USE else FAILED
    told = failures[first].message
    if failures[first].exitcode > 0 and not Path(failures[first].error_file).is_file():
        told = f"exit code {failures[first].exitcode}"
    fail(f"rank {first}: {told}", code)
