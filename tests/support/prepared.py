"""Run a body on the arguments of its op: weights are first converted to the layout that the body needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from infuse.ops import registered


def run_body(name: str, body: str, *args: object) -> object:
    """The result of a body, its weights prepared."""
    function, prepared = registered()[name].prepared(body, args)
    return function(*prepared)


def runner(name: str, body: str) -> Callable:
    """`run_body` of one body, to be called with the op's arguments."""
    return partial(run_body, name, body)
