"""Sizes of a traced call that are variables, such as batch and tokens: branches of a layer on them show.

Imported where a layer is traced: Dynamo and sympy, which come with it, take a second.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource  # transformers' models import it too
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext, statically_known_true
from torch.utils._pytree import tree_leaves
from torch.utils._sympy.functions import FloorDiv

from infuse.reading.graph import LayerGraph, Size, is_in_layer, op_name, values_in
from infuse.reading.resized import resized

# Layers that can be read leave one open at most. Those that cut pictures into windows leave over a hundred, also inside
# operations, which PyTorch takes seconds to tell apart, and have branches in the end.
MOST_BRANCHES = 32


class TooManyBranches(Exception):
    """More branches on sizes than are worth telling apart."""

    def __str__(self) -> str:
        """How many, and the line of the layer's source that was reached."""
        lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(self.__traceback__)]
        inside = [f"{Path(file).name}:{line}" for file, line in lines if is_in_layer(file)]
        return f"more than {MOST_BRANCHES} up to {inside[-1]}" if inside else f"more than {MOST_BRANCHES}"


class Variables:
    """The sizes of a call that vary, by their numbers in the call. `sums`: numbers that are the sum of two others."""

    def __init__(self, numbers: Collection[int], sums: Iterable[tuple[int, int]]):
        self._env = ShapeEnv()
        made = {a + b for a, b in sums}
        self._known = {number: self._variable(number) for number in sorted(numbers) if number not in made}
        for a, b in sums:
            self._known[a + b] = self._known.get(a, a) + self._known.get(b, b)

    def _variable(self, number: int) -> Any:
        like, context = torch.empty(number, device="meta"), StatelessSymbolicContext([DimDynamic.DYNAMIC])
        source = ConstantSource(f"size_{number}")
        sizes, _, _ = self._env.create_symbolic_sizes_strides_storage_offset(like, source, symbolic_context=context)
        return torch.SymInt(_Settled.of(sizes[0].node))

    def tensor(self, like: Tensor, axes: Iterable[int]) -> Tensor:
        """A tensor on meta as `like`, whose sizes in `axes` are variables where they are known."""
        return resized(like, dict.fromkeys(axes, self._known))

    def branches(self) -> str:
        """What a layer's branches assume of the variables; empty if all sizes from 2 on take the same way."""
        places = [_place(guard) for guard in self._env.guards]
        ranges = [
            f"from {bounds.lower} to {bounds.upper}" if bounds.lower != bounds.upper else f"it is {bounds.lower} alone"
            for symbol, bounds in self._env.var_to_range.items()
            if not (str(bounds.lower) in ("0", "1", "2") and _is_endless(bounds.upper))
        ]
        return ", ".join(dict.fromkeys(filter(None, [*places, *ranges])))


class _Settled(SymNode):
    """A variable, or what is computed of variables. A comparison that all sizes answer alike is a plain bool, which
    operations take as one: `is_causal=tokens > 1`. Any other stays open, and asking for its answer is a branch.
    """

    @staticmethod
    def of(node: SymNode) -> SymNode:
        if node.is_bool() and node.constant is None:
            answer = bool(node.hint)  # at the recorded sizes; no other can be certain
            if statically_known_true(torch.SymBool(node if answer else SymNode.sym_not(node))):
                node = node.wrap_bool(answer)
        node.__class__ = _Settled
        if len(node.shape_env.guards) > MOST_BRANCHES:
            raise TooManyBranches
        return node


def _settling(method: Callable[..., SymNode]) -> Callable[..., SymNode]:
    @functools.wraps(method)
    def settled(self: SymNode, *others: Any) -> SymNode:
        return _Settled.of(method(self, *others))

    return settled


_METHODS = (
    "wrap_int wrap_float wrap_bool abs add sub mul mod neg pow_by_natural float_pow float_truediv int_truediv "
    "int_floordiv lshift rshift floor ceil round trunc sym_float sym_int sym_min sym_max sym_ite sym_sum "
    "eq ne gt lt le ge and_ or_ sym_not is_integer"
)
for _name in _METHODS.split():
    setattr(_Settled, _name, _settling(getattr(SymNode, _name)))


def as_values(graph: LayerGraph) -> str:
    """How a layer uses a size otherwise than to say how many of something there are: as a number that it computes
    with, or in steps. A comparison at a few sizes tells nothing of others then. Empty if it does not.
    """
    for node in graph.operations():
        at = f"`{op_name(node)}`{graph.where(node)}"
        if op_name(node) != "arange" and any(isinstance(value, Size) for value in values_in(node)):
            return f"computes with a size: {at}"
        sizes = [leaf for leaf in tree_leaves((node.args, node.kwargs)) if isinstance(leaf, Size)]
        if steps := [size for size in sizes if not _divided(sympy.sympify(size.expression)).is_polynomial()]:
            return f"has a branch on a size: {at} takes {steps[0]}"
    return ""


def _divided(expression: sympy.Expr) -> sympy.Expr:
    """Carry out divisions without remainder, as of the size that a -1 in `reshape` stands for."""
    return expression.replace(FloorDiv, lambda number, divisor: _exact(number, divisor) or FloorDiv(number, divisor))


def _exact(number: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr | None:
    quotient = sympy.cancel(number / divisor)
    if not quotient.is_polynomial() or not quotient.free_symbols:
        return quotient if quotient.is_integer else None
    return quotient if sympy.Poly(quotient, *quotient.free_symbols).domain.is_ZZ else None


def _place(guard: Any) -> str:
    """The line of the layer's source that asks about a size; empty for what operations of PyTorch ask."""
    frame = getattr(getattr(guard, "sloc", None), "framework_loc", None)
    file = getattr(frame, "filename", "")
    return f"{Path(file).name}:{frame.lineno}" if file and is_in_layer(file) else ""  # type: ignore[union-attr]


def _is_endless(bound: Any) -> bool:
    return not str(bound).lstrip("-").isdigit() or int(bound) >= 1 << 62
