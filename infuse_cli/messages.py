"""Errors, remarks and progress bars of the command line, on standard error; of several ranks, once."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.progress import track

FAILED, WRONG_USE = 1, 2  # exit codes
LAUNCHED = "INFUSE_LAUNCHED"  # set in the environment of ranks that `--tp` started


@contextmanager
def without_tracebacks() -> Iterator[None]:
    """Print errors that a user can act on without a traceback; others keep theirs."""
    from infuse.ground.errors import ConfigError, InfuseError

    try:
        yield
    except ConfigError as error:
        fail(str(error), WRONG_USE)
    except BrokenPipeError:  # `infuse plan ... | head`: typer ends quietly
        raise
    except (InfuseError, OSError, MemoryError) as error:
        fail(f"{type(error).__name__}: {error}", FAILED)


def is_rank() -> bool:
    """Whether torchrun or `--tp` started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def fail(message: str, code: int) -> NoReturn:
    """Print an error and exit. A rank leaves the message to its launcher: `--tp` prints it once for all ranks."""
    if is_rank() and (place := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        Path(place).write_text(json.dumps({"message": message, "timestamp": int(time.time())}), encoding="utf-8")
        if os.environ.get(LAUNCHED):
            raise typer.Exit(code)
    remarks().print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code)


def described(error: Exception) -> str:
    """The error's message, with its class where the message alone says little: KeyError's is a name."""
    return str(error) if isinstance(error, (OSError, ValueError, RuntimeError)) else f"{type(error).__name__}: {error}"


@contextmanager
def refusals_of_generate(model: Any, tokens: int) -> Iterator[None]:
    """Print refusals of `generate` without a traceback, including `tokens` beyond a table of the model."""
    try:
        yield
    except ValueError as error:
        fail(str(error), WRONG_USE)
    except IndexError as error:
        config = model.config.get_text_config()
        known = [("max_position_embeddings", "positions"), ("vocab_size", "ids of tokens")]
        sizes = [f"{value} {what}" for name, what in known if (value := getattr(config, name, None)) is not None]
        limits = " and ".join(sizes)
        fail(f"{error}: prompt and answer have {tokens} tokens, and the model has {limits}; ask for fewer", WRONG_USE)


def bar(items: Iterable[Any], description: str) -> Iterable[Any]:
    """A progress bar on terminals, nothing elsewhere."""
    return track(items, description=description, console=remarks(), transient=True, disable=not sys.stderr.isatty())


def remarks() -> Console:
    """Standard error of rank 0."""
    return Console(stderr=True, quiet=is_rank() and os.environ["RANK"] != "0")


class Counted:
    """Passes pieces of text on to a streamer of transformers and counts them: one for each step."""

    def __init__(self, streamer: Any):
        self._streamer, self.pieces = streamer, 0

    def put(self, value: Any) -> None:
        self.pieces += 1
        self._streamer.put(value)

    def end(self) -> None:
        self._streamer.end()
