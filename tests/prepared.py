"""The arguments of an op as a body takes them: weights in the layout that the body asks for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from infuse.ops import REFERENCE, registered
from infuse.quant.format import QuantizedWeight, quant_format


def body_and_args(name: str, body: str, args: tuple) -> tuple[Callable, tuple]:
    """The function of a body and its arguments; the reference and the arguments as they are where its layout declines the weight."""
    chosen = registered()[name].bodies[body]
    if chosen.layout is None:
        return chosen.function, args
    # The arguments of a quantized weight have these names in every op: data, scale, zero, its two sizes, format.
    names = [argument.name for argument in getattr(torch.ops.infuse, name).default._schema.arguments]
    data, text = names.index("data"), names.index("format")
    buffers, sizes = args[data : data + 3], args[text - 2 : text]
    held = chosen.layout.prepare(QuantizedWeight(*buffers, sizes, quant_format(args[text])))
    if held is None:
        return registered()[name].body(REFERENCE), args
    return chosen.function, (*args[:data], held.data, held.scale, held.zero, *args[data + 3 :])


def run_body(name: str, body: str, *args: object) -> object:
    """The result of a body, its weights prepared."""
    function, prepared = body_and_args(name, body, args)
    return function(*prepared)


def runner(name: str, body: str) -> Callable:
    """`run_body` of one body, to be called with the op's arguments."""
    return partial(run_body, name, body)
