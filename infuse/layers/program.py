"""The interpreter of programs (architectures/program.py): each step becomes a function when a block is built.

A function takes a Stream, which holds what the steps work on, and the block's parts by name. Functions are partials of
those below, so that blocks can be copied and pickled, and parts exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from infuse.architectures.program import (
    ADD,
    ADD_NORM,
    ADD_NORM_STREAM,
    ATTENTION,
    CARRY,
    CAT,
    CLIP,
    EMBED,
    END,
    FOLDED_ATTENTION,
    FOLDED_MLP,
    JOINT,
    MASK,
    MLP,
    MODULATE,
    NORM,
    NORM_BRANCH,
    NORM_STREAM,
    REDUCE,
    SKIP,
    SPLIT,
    TAKE,
    TEXT_MASK,
    TIME,
    TURNS,
    Program,
    Step,
)
from infuse.layers.inputs import Inputs
from infuse.layers.linear import direct, untouched
from infuse.layers.norm import Norm

LARGEST = 65504  # of float16
Parts = Mapping[str, Any]  # attribute access on an nn.Module takes 0.7 us


class Stream:
    """One residual stream while a program runs: x, y = the input of the next part, branch = the sum of parts so far.

    `inputs`: what the model passed to a layer. `weights`: of each attention, None unless wanted.
    """

    __slots__ = ("branch", "inputs", "weights", "x", "y")

    def __init__(self, x: Tensor, inputs: Inputs):
        self.x, self.y, self.inputs = x, x, inputs
        self.branch: Any = None  # a tensor once a part has run
        self.weights: list[Tensor | None] = []


Run = Callable[[Any, Parts], None]


def compiled(program: Program, reduce: Callable[[Tensor], Tensor] | None = None) -> tuple[Run, ...]:
    """The functions of a layer's program. `reduce` adds up its branches over ranks."""
    return tuple(_LAYER[step.does](step, reduce) for step in program)


def run(steps: tuple[Run, ...], parts: Parts, x: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Run a layer's program on x. Return its output and the weights of its first attention."""
    stream = Stream(x, inputs)
    for step in steps:
        step(stream, parts)
    return stream.x, stream.weights[0] if stream.weights else None


def _norm(name: str, s: Stream, parts: Parts) -> None:
    s.y = direct(parts[name], s.x)


def _norm_stream(name: str, s: Stream, parts: Parts) -> None:
    s.x = s.y = direct(parts[name], s.x)


def _norm_branch(name: str, s: Stream, parts: Parts) -> None:
    s.branch = direct(parts[name], s.branch)


def _mix(name: str, s: Stream, parts: Parts) -> None:
    made, weights = parts[name](s.y, s.inputs)
    s.weights.append(weights)
    s.branch = made if s.branch is None else s.branch + made


def _over(name: str, over: str, s: Stream, parts: Parts) -> None:
    made, weights = parts[name](s.y, s.inputs, s.inputs.values[over])
    s.weights.append(weights)
    s.branch = made if s.branch is None else s.branch + made


def _mlp(name: str, s: Stream, parts: Parts) -> None:
    made = direct(parts[name], s.y)
    s.branch = made if s.branch is None else s.branch + made


def _folded_attention(name: str, norm: str, s: Stream, parts: Parts) -> None:
    s.branch, weights = parts[name].forward(s.x, s.inputs, parts[norm] if norm else None, s.branch)
    s.weights.append(weights)


def _folded_mlp(name: str, norm: str, s: Stream, parts: Parts) -> None:
    s.branch = parts[name].fused(s.x, parts[norm] if norm else None, s.branch)


def _carry(s: Stream, parts: Parts) -> None:
    s.branch = s.x


def _take(s: Stream, parts: Parts) -> None:
    s.x = s.y = s.branch
    s.branch = None


def _reduce(reduce: Callable[[Tensor], Tensor], s: Stream, parts: Parts) -> None:
    s.branch = reduce(s.branch)


def _add(scale: float, s: Stream, parts: Parts) -> None:
    s.x = s.y = s.x + (s.branch if scale == 1.0 else s.branch * scale)
    s.branch = None


def _add_norm(name: str, scale: float, s: Stream, parts: Parts) -> None:
    s.x, s.y = added(parts[name], s.branch if scale == 1.0 else s.branch * scale, s.x)
    s.branch = None


def _add_norm_stream(name: str, scale: float, s: Stream, parts: Parts) -> None:
    s.x = s.y = added(parts[name], s.branch if scale == 1.0 else s.branch * scale, s.x)[1]
    s.branch = None


_LAYER: Mapping[str, Callable[[Step, Any], Run]] = MappingProxyType(
    {
        NORM: lambda step, _: partial(_norm, step.part),
        NORM_STREAM: lambda step, _: partial(_norm_stream, step.part),
        NORM_BRANCH: lambda step, _: partial(_norm_branch, step.part),
        ATTENTION: lambda step, _: partial(_over, step.part, step.over) if step.over else partial(_mix, step.part),
        MLP: lambda step, _: partial(_mlp, step.part),
        FOLDED_ATTENTION: lambda step, _: partial(_folded_attention, step.part, step.norm),
        FOLDED_MLP: lambda step, _: partial(_folded_mlp, step.part, step.norm),
        CARRY: lambda step, _: _carry,
        TAKE: lambda step, _: _take,
        REDUCE: lambda step, reduce: partial(_reduce, reduce),
        ADD: lambda step, _: partial(_add, step.scale),
        ADD_NORM: lambda step, _: partial(_add_norm, step.part, step.scale),
        ADD_NORM_STREAM: lambda step, _: partial(_add_norm_stream, step.part, step.scale),
    }
)


def added(norm: nn.Module, branch: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum and its norm, computed in one pass if the norm has no hooks."""
    if type(norm) is Norm and untouched(norm):
        return norm.add(branch, x)
    x = x + branch
    return x, norm(x)


def _sum_with(mlp: Any, y: Tensor, branch: Tensor | None) -> Tensor:
    """branch + mlp(y), computed in its last product if the MLP has no hooks."""
    if branch is None:
        return direct(mlp, y)
    return mlp.fused(y, None, branch) if untouched(mlp) else branch + mlp(y)  # type: ignore[no-any-return]


def run_streams(program: Program, block: Any, values: dict[str, Any]) -> None:
    """Run the program on the streams [B, T, C] in `values`, where their results take their place.

    `block` has the parts and `gated_add`. `values` has masks, rotations and the time step, too.
    """
    parts: dict[str, Any] = block._modules
    y: dict[str, Any] = {}
    branch: dict[str, Any] = {}
    vectors: dict[str, tuple[Tensor, ...]] = {}
    for does, name, _, _, on, by, over in program:
        x: Any = values.get(on)
        part: Any = parts.get(name)
        given = [vectors[on][i] for i in by]
        if does == NORM:
            if part is None:
                y[on] = x
            elif len(by) == 1:
                y[on] = direct(part, x) + given[0][:, None]
            else:
                y[on] = part(x, *given) if by else direct(part, x)
        elif does == ATTENTION:
            mask = values.get(TEXT_MASK if over else MASK)
            attended = part.attended if untouched(part) else part.called
            branch[on] = attended(y.pop(on), values.get(over), mask, branch.get(on), values.get(TURNS))
        elif does == JOINT:
            first, second = parts[on], parts[over]
            both = first.over(y[on], second, y[over], values.get(TURNS))
            one, other = both.split([y.pop(on).shape[1], y.pop(over).shape[1]], dim=1)
            branch[on], branch[over] = first.projected(one), second.projected(other)
        elif does == MLP:
            branch[on] = _sum_with(part, y.pop(on), branch.get(on))
        elif does == ADD:
            values[on] = block.gated_add(branch.pop(on), *given, x) if by else x + branch.pop(on)
        elif does == ADD_NORM and by:
            values[on], y[on] = part.add(branch.pop(on), x, *given)
        elif does == ADD_NORM:
            values[on], y[on] = added(part, branch.pop(on), x)
        elif does == CARRY:
            branch[on] = x
        elif does == TAKE:
            values[on] = branch.pop(on)
        elif does == EMBED:
            values[TIME] = part.emb(values[TIME], values[over], x.dtype)
        elif does == MODULATE:
            vectors = part(values[TIME])
        elif does == SKIP:
            values[on] = part(x, values[SKIP])
        elif does == CAT:
            values[on] = torch.cat((values[over], x), dim=1)
        elif does == SPLIT:
            length = values[over].shape[1]
            values[over], values[on] = x[:, :length], x[:, length:]
        elif does == CLIP:
            values[on] = x.clip(-LARGEST, LARGEST) if x.dtype == torch.float16 else x
        else:
            assert does == END, does
            values[on] = None
