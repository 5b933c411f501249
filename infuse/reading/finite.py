"""Layers that clamp their results in float16, always or where some value is not finite, which a trace cannot know.

A layer asks `torch.isfinite(x).all()`, `isinf(x).any()` or `isnan(x).any()`. It is told an answer and traced both ways;
what it asks about, it must clamp.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from infuse.architectures.program import CLAMP, CLAMP_INFINITE, Step
from infuse.reading.graph import LayerGraph, op_name

_OF_FINITE = {torch.isfinite: True, Tensor.isfinite: True}
_OF_OTHERS = {torch.isinf: False, Tensor.isinf: False, torch.isnan: False, Tensor.isnan: False}
_LEAST_LIMIT = 60000  # nearer to 0, a clamp is no matter of float16
_CLAMPS = (torch.clamp, Tensor.clamp)


@dataclass
class Answers(TorchFunctionMode):
    """Context in which a layer that asks whether values in float16 are finite is told `finite`."""

    finite: bool
    asked: list[Tensor] = field(default_factory=list)
    clamped: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kinds = {**_OF_FINITE, **_OF_OTHERS}
        if function in kinds and len(args) == 1 and args[0].dtype == torch.float16:
            self.asked.append(args[0])
            return _AllFinite(self.finite) if kinds[function] else _AnyOther(not self.finite)
        if function in _CLAMPS:
            self.clamped.append(args[0])
        return function(*args, **(kwargs or {}))

    @property
    def are_clamped(self) -> bool:
        """Whether what it asked about is what it clamps."""
        return all(any(asked is clamped for clamped in self.clamped) for asked in self.asked)


@dataclass(frozen=True)
class _AllFinite:
    """Stands for a tensor that tells of each value whether it is finite. What else is asked of it raises."""

    value: bool

    def all(self) -> bool:
        return self.value


@dataclass(frozen=True)
class _AnyOther:
    """Stands for a tensor that tells of each value whether it is not finite. What else is asked of it raises."""

    value: bool

    def any(self) -> bool:
        return self.value


def take_clamp(graph: LayerGraph, asks: bool) -> tuple[Step, ...]:
    """Take a clamp of the layer's first result, between -limit and limit, off the graph, and return it as a step."""
    last = graph.outputs[0]
    if not isinstance(last, Node) or op_name(last) != "clamp" or graph.dtype != torch.float16:
        return ()
    x, least, most = (*last.args, None, None)[:3]
    if not isinstance(x, Node) or not isinstance(most, (int, float)) or least != -most or most < _LEAST_LIMIT:
        return ()
    graph.outputs[0] = graph.follow(x)
    return (Step(CLAMP_INFINITE if asks else CLAMP, scale=float(most)),)
