"""`infuse ARGUMENTS`, run as a program, whose ranks are forks of its launcher: torchrun's also takes a function."""

from __future__ import annotations

from typing import Any

from torch.distributed.launcher import api

from infuse.cli.app import app

by_command = api.elastic_launch


def rank() -> None:
    """What the command would run. The launcher waits for a function to return; it takes another end for a failure."""
    try:
        app()
    except SystemExit as end:
        if end.code:
            raise


def by_function(config: api.LaunchConfig, program: str) -> Any:
    config.start_method = "fork"
    launch = by_command(config, rank)
    return lambda *arguments: launch()


api.elastic_launch = by_function  # type: ignore[assignment, misc]
app()
