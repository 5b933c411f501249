"""The command line, run in the tests' own process."""

from __future__ import annotations

from typer.testing import CliRunner

from infuse_cli.app import app

PROMPT = "def add("


def run(*arguments, code=0):
    """Run a command; its standard output and standard error, after the exit code was checked."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == code, f"exit code {done.exit_code}\n{done.output}\n{done.exception!r}"
    return done.stdout, done.stderr
