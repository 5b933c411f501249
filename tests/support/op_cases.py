"""The cases of an op, its arguments in other dtypes, poisoned or not finite, and all that a call returns and writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

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
    copies = list(tree_map_only(Tensor, Tensor.clone, args))
    for i in poisoned:
        copies[i].fill_(float("nan") if copies[i].is_floating_point() else 77)
    return tuple(copies)


def results(function: Any, args: tuple, mutated: list[int]) -> list[Tensor]:
    """What it returns (but None), then what it has written."""
    out = function(*args)
    returned = out if isinstance(out, (tuple, list)) else (out,)
    return [*(t for t in returned if t is not None), *(args[i] for i in mutated)]


def in_float32(args: tuple, dtype: torch.dtype) -> tuple:
    """The arguments with those in `dtype` widened, but for buffers, whose dtypes are those of their format."""
    return tuple(arg.float() if isinstance(arg, Tensor) and arg.dtype == dtype else arg for arg in args)


def planted(name: str, value: float) -> Iterator[tuple[int, Case]]:
    """Each case with `value` in the last place of one argument, for each argument that holds real numbers and is not
    written to. The last of a gated activation is multiplied: its first place goes through the activation.
    """
    for case in cases(name, torch.float32):
        for i, arg in enumerate(case.args):
            for which, tensor in enumerate(tree_leaves(arg)):
                if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or i in written(name):
                    continue
                for place in ((0, -1) if name == "gated_activation" else (-1,)) if tensor.numel() else ():
                    args = own(case.args, [])
                    tree_leaves(args[i])[which][(place,) * tensor.dim()] = value
                    yield i, replace(case, args=args)


def widened(args: tuple) -> tuple:
    """What is in float32, in float64."""
    return tree_map_only(Tensor, lambda tensor: tensor.double() if tensor.dtype == torch.float32 else tensor, args)


def assert_unchanged(before: Any, after: Any, what: str) -> None:
    """All tensors in an argument have the same values, of any dtype, before and after."""
    for old, new in zip(tree_leaves(before), tree_leaves(after), strict=True):
        if isinstance(old, Tensor):
            assert torch.equal(old.float().nan_to_num(), new.float().nan_to_num()), what
