"""The arguments of an op as a body takes them: weights in the layout that the body asks for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from infuse.ops import REFERENCE, registered
from infuse.quant.format import QuantizedWeight, quant_format


def body_and_args(name: str, body: str, args: tuple) -> tuple[Callable, tuple]:
    """The function of a body and its arguments; the reference and the arguments as they are where its layout declines the weight."""
    chosen = registered()[name].bodies[body]
    if chosen.layout is None:
        return chosen.function, args
    assert name == "quantized_linear", f"say here which arguments of {name} are a weight"
    x, data, scale, zero, bias, outputs, inputs, text = args
    held = chosen.layout.prepare(QuantizedWeight(data, scale, zero, (outputs, inputs), quant_format(text)))
    if held is None:
        return registered()[name].body(REFERENCE), args
    return chosen.function, (x, held.data, held.scale, held.zero, bias, outputs, inputs, text)


def run_body(name: str, body: str, *args: object) -> object:
    """The result of a body, its weights prepared."""
    function, prepared = body_and_args(name, body, args)
    return function(*prepared)


def runner(name: str, body: str) -> Callable:
    """`run_body` of one body, to be called with the op's arguments."""
    return partial(run_body, name, body)
