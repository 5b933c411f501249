"""The cases of an op, its arguments in other dtypes, poisoned or not finite, and all that a call returns and writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from infuse.ops import Case, registered

CPU = torch.device("cpu")


def cases(name: str, dtype: torch.dtype) -> list[Case]:
    maker = registered()[name].case_maker
    assert maker is not None
    return list(maker(dtype, CPU))


def written(name: str) -> list[int]:
    """The positions of the arguments that the op writes to, from its schema."""
    arguments = getattr(torch.ops.infuse, name).default._schema.arguments
    return [
        i for i, argument in enumerate(arguments) if argument.alias_info is not None and argument.alias_info.is_write
    ]


def own(args: tuple, poisoned: list[int]) -> tuple:
    """The arguments as copies; those at `poisoned` full of NaN, or of 77 if they hold integers."""
    copies = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
    for i in poisoned:
        copies[i].fill_(float("nan") if copies[i].is_floating_point() else 77)
    return tuple(copies)


def results(function: Any, args: tuple, mutated: list[int]) -> list[Tensor]:
    """What it returns (but None), then what it has written."""
    out = function(*args)
    return [*(t for t in (out if isinstance(out, tuple) else (out,)) if t is not None), *(args[i] for i in mutated)]


def in_float32(name: str, args: tuple, dtype: torch.dtype) -> tuple:
    """The arguments with those in `dtype` widened, but for scales: they are bfloat16 whatever the activations are."""
    arguments = getattr(torch.ops.infuse, name).default._schema.arguments
    return tuple(
        arg.float() if isinstance(arg, Tensor) and arg.dtype == dtype and not argument.name.endswith("scale") else arg
        for arg, argument in zip(args, arguments, strict=False)
    )


def planted(name: str, value: float) -> Iterator[tuple[int, Case]]:
    """Each case with `value` in the last place of one argument, for each argument that holds real numbers and is not
    written to. The last of a gated activation is multiplied: its first place goes through the activation.
    """
    for case in cases(name, torch.float32):
        for i, arg in enumerate(case.args):
            if isinstance(arg, Tensor) and arg.is_floating_point() and arg.numel() and i not in written(name):
                for place in (0, -1) if name == "gated_activation" else (-1,):
                    args = own(case.args, [])
                    args[i][(place,) * arg.dim()] = value
                    yield i, replace(case, args=args)


def widened(args: tuple) -> tuple:
    """What is in float32, in float64."""
    return tuple(arg.double() if isinstance(arg, Tensor) and arg.dtype == torch.float32 else arg for arg in args)
