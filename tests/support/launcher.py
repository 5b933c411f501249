"""`python ARGUMENTS`, run as a program, whose ranks are forks of torchrun's launcher instead of fresh interpreters."""

from __future__ import annotations

import sys
from typing import Any

from torch.distributed.launcher import api

from tests.support.forked import run_program

by_command = api.elastic_launch


def rank(*arguments: str) -> None:
    """What the command would run. The launcher waits for a function to return; it takes another end for a failure."""
    try:
        run_program([argument for argument in arguments if argument != "-u"])
    except SystemExit as end:
        if end.code:
            raise


def by_function(config: api.LaunchConfig, entrypoint: str) -> Any:
    config.start_method = "fork"
    return by_command(config, rank)


api.elastic_launch = by_function  # type: ignore[assignment, misc]
run_program(sys.argv[1:])
