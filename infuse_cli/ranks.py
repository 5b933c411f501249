"""`--tp` and `--ep`: torchrun's own launcher, called in this process, runs the command again as several ranks.

Rank 0 prints, the others are silent. If one fails, all end, with one message.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
import warnings
from pathlib import Path
from typing import Any

from infuse_cli.messages import FAILED, LAUNCHED, WRONG_USE, fail, is_rank

INTERRUPTED = 130  # 128 + SIGINT, as in shells


def as_ranks(size: int) -> bool:
    """Whether this process runs the command. If not, `size` ranks were started and have run the same command line.

    Exits with a message if a rank fails, or on Ctrl-C.
    """
    if size == 1:
        return True
    if is_rank():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher gets the signal too; a rank needs no traceback
        if os.environ["RANK"] != "0":
            warnings.simplefilter("ignore")
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # until the process ends
        return True
    _launch(size, [sys.executable, "-m", "infuse_cli.app", *sys.argv[1:]])
    return False


def rank_device(device: str | None) -> str | None:
    """This rank's device: of several GPUs, the one with the rank's number on this host."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device


def _launch(size: int, command: list[str]) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // size)))
    os.environ[LAUNCHED] = "1"
    logging.disable(logging.CRITICAL)  # the launcher would log a screenful for each error
    with tempfile.TemporaryDirectory(prefix="infuse-ranks-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=size,
            run_id=uuid.uuid4().hex,
            max_restarts=0,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            logs_specs=DefaultLogsSpecs(log_dir=str(Path(folder, "log"))),
        )
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            _fail_as_first(error.failures)
        except SignalException as error:
            fail(f"ended by {error.sigval.name}; so are all ranks", INTERRUPTED)
        finally:
            logging.disable(logging.NOTSET)
            del os.environ[LAUNCHED]


def _fail_as_first(failures: dict[int, Any]) -> None:
    """Exit with the message and code of the rank that failed first."""
    rank = min(failures, key=lambda rank: (failures[rank].timestamp, rank))
    failure = failures[rank]
    has_message = failure.exitcode <= 0 or Path(failure.error_file).is_file()
    message = failure.message if has_message else f"exit code {failure.exitcode}"
    fail(f"rank {rank}: {message}", WRONG_USE if failure.exitcode == WRONG_USE else FAILED)
