"""The interpreter of programs (architectures/program.py): each step becomes a function when a block is built.

A function takes what the steps work on, a Stream of a layer or the Streams of a diffusion block, and the block's parts
by name. Functions are partials of those below, so that blocks can be copied and pickled, and parts exchanged.
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
    ADD_WIDE,
    ATTENTION,
    CARRY,
    CAT,
    CLAMP,
    CLAMP_INFINITE,
    CLIP,
    COS_SIN,
    EMBED,
    END,
    FOLDED_ATTENTION,
    FOLDED_MLP,
    IMAGE,
    JOINT,
    MASK,
    MLP,
    MODULATE,
    NORM,
    NORM_BRANCH,
    NORM_NARROWED,
    NORM_OF_WIDE,
    NORM_STREAM,
    REDUCE,
    SKIP,
    SPLIT,
    TAKE,
    TEXT,
    TEXT_MASK,
    TIME,
    Program,
    Step,
)
from infuse.layers.calls.called_part import has_listeners, heard, heard_mlp, is_heard
from infuse.layers.calls.inputs import Inputs
from infuse.layers.linear import direct, has_no_hooks
from infuse.layers.norm import Norm

LARGEST = 65504  # of float16
Parts = Mapping[str, Any]  # attribute access on an nn.Module takes 0.7 us


class Stream:
    """One residual stream while a program runs: x, y = the input of the next part, branch = the sum of parts so far.

    `inputs`: what the model passed to a layer. `weights`: of each attention, None unless wanted.
    """

    __slots__ = ("branch", "inputs", "weights", "x", "y")

    def __init__(self, x: Any, inputs: Any = None):
        self.x, self.y, self.inputs = x, x, inputs
        self.branch: Any = None  # a tensor once a part has run
        self.weights: list[Tensor | None] = []


class Streams:
    """The streams of a block, and the other values of its call: masks, rotations, the time step.

    `vectors`: by stream, what the time step makes. `gated_add` is the block's.
    """

    def __init__(self, values: dict[str, Any], gated_add: Callable[..., Tensor]):
        self.values, self.gated_add = values, gated_add
        self.of = {name: Stream(values.get(name)) for name in (IMAGE, TEXT)}
        self.vectors: Mapping[str, tuple[Tensor, ...]] = {}

    def given(self, on: str, by: tuple[int, ...]) -> list[Tensor]:
        vectors = self.vectors[on]
        return [vectors[i] for i in by]


Run = Callable[[Any, Parts], None]


def compiled(program: Program, reduce: Callable[[Tensor], Tensor] | None = None) -> tuple[Run, ...]:
    """The functions of a layer's program, which take its Stream. `reduce` adds up its branches over ranks."""
    return tuple(_OF_A_STREAM[step.does](step, reduce) for step in program)


def compiled_streams(program: Program) -> tuple[Run, ...]:
    """The functions of a program over several streams, which take these Streams."""
    return tuple(_of_streams(step) for step in program)


def run(
    steps: tuple[Run, ...], parts: Parts, x: Tensor, inputs: Inputs
) -> tuple[Tensor, list[Tensor | None], Tensor | None]:
    """Run a layer's program on x. Return its output, the weights of each attention and the bias of their scores."""
    stream = Stream(x, inputs)
    for step in steps:
        step(stream, parts)
    return stream.x, stream.weights, stream.inputs.bias


# ---- steps of one stream


def _norm(name: str, s: Stream, parts: Parts) -> None:
    s.y = direct(parts[name], s.x) if name else s.x


def _norm_of_sum(name: str, over: str, s: Stream, parts: Parts) -> None:
    value = s.inputs.values[over]
    s.y = direct(parts[name], s.x if value is None else s.x + value)


def _norm_stream(name: str, s: Stream, parts: Parts) -> None:
    s.x = s.y = direct(parts[name], s.x)


def _norm_branch(name: str, s: Stream, parts: Parts) -> None:
    s.branch = direct(parts[name], s.branch)


def _norm_narrowed(name: str, s: Stream, parts: Parts) -> None:
    norm = parts[name]
    s.y = direct(norm, s.x.to(norm.weight.dtype))


def _norm_of_wide(name: str, s: Stream, parts: Parts) -> None:
    norm = parts[name]
    s.y = direct(norm, s.x).to(norm.weight.dtype)


def _mix(name: str, s: Stream, parts: Parts) -> None:
    part = parts[name]
    returned = heard(name, part, s) if is_heard(part) else part.mix(s.y, s.inputs)
    made, weights, *_ = returned if isinstance(returned, tuple) else (returned, None)
    s.weights.append(weights)
    s.branch = made if s.branch is None else s.branch + made


def _over(name: str, over: str, s: Stream, parts: Parts) -> None:
    part, value = parts[name], s.inputs.values[over]
    made, weights = heard(name, part, s, value) if is_heard(part) else part.mix(s.y, s.inputs, value)
    s.weights.append(weights)
    s.branch = made if s.branch is None else s.branch + made


def _mlp(name: str, s: Stream, parts: Parts) -> None:
    part = parts[name]
    made = heard_mlp(name, part, s) if has_listeners(part) else part.forward(s.y)
    if type(made) is tuple:
        made = made[0]
    s.branch = made if s.branch is None else s.branch + made


def _mlp_with_mask(name: str, s: Stream, parts: Parts) -> None:
    made = parts[name](s.y, s.inputs.mask)
    s.branch = made if s.branch is None else s.branch + made


def _folded_attention(name: str, norm: str, s: Stream, parts: Parts) -> None:
    s.branch, weights = parts[name].mix(s.x, s.inputs, parts[norm] if norm else None, s.branch)
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


def _add_wide(scale: float, s: Stream, parts: Parts) -> None:
    s.x = s.y = s.x.float() + (s.branch if scale == 1.0 else s.branch * scale)
    s.branch = None


def _add_norm(name: str, scale: float, s: Stream, parts: Parts) -> None:
    s.x, s.y = _added(parts[name], s.branch if scale == 1.0 else s.branch * scale, s.x)
    s.branch = None


def _add_norm_stream(name: str, scale: float, s: Stream, parts: Parts) -> None:
    s.x = s.y = _added(parts[name], s.branch if scale == 1.0 else s.branch * scale, s.x)[1]
    s.branch = None


def _clamp(limit: float, s: Stream, parts: Parts) -> None:
    if s.x.dtype == torch.float16:
        s.x = s.y = s.x.clamp(-limit, limit)


def _clamp_infinite(limit: float, s: Stream, parts: Parts) -> None:
    if s.x.dtype == torch.float16:  # without asking for a value, for which the host would wait
        most = torch.isfinite(s.x).all().to(s.x.dtype) * (LARGEST - limit) + limit
        s.x = s.y = torch.minimum(torch.maximum(s.x, -most), most)


_OF_A_STREAM: Mapping[str, Callable[[Step, Any], Run]] = MappingProxyType(
    {
        NORM: lambda step, _: partial(_norm_of_sum, step.part, step.over) if step.over else partial(_norm, step.part),
        NORM_STREAM: lambda step, _: partial(_norm_stream, step.part),
        NORM_BRANCH: lambda step, _: partial(_norm_branch, step.part),
        ATTENTION: lambda step, _: partial(_over, step.part, step.over) if step.over else partial(_mix, step.part),
        MLP: lambda step, _: partial(_mlp_with_mask if step.over == MASK else _mlp, step.part),
        FOLDED_ATTENTION: lambda step, _: partial(_folded_attention, step.part, step.norm),
        FOLDED_MLP: lambda step, _: partial(_folded_mlp, step.part, step.norm),
        CARRY: lambda step, _: _carry,
        TAKE: lambda step, _: _take,
        REDUCE: lambda step, reduce: partial(_reduce, reduce),
        ADD: lambda step, _: partial(_add, step.scale),
        NORM_NARROWED: lambda step, _: partial(_norm_narrowed, step.part),
        NORM_OF_WIDE: lambda step, _: partial(_norm_of_wide, step.part),
        ADD_WIDE: lambda step, _: partial(_add_wide, step.scale),
        CLAMP: lambda step, _: partial(_clamp, step.scale),
        CLAMP_INFINITE: lambda step, _: partial(_clamp_infinite, step.scale),
        ADD_NORM: lambda step, _: partial(_add_norm, step.part, step.scale),
        ADD_NORM_STREAM: lambda step, _: partial(_add_norm_stream, step.part, step.scale),
    }
)


def _added(norm: nn.Module, branch: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum and its norm, computed in one pass if the norm has no hooks."""
    if type(norm) is Norm and has_no_hooks(norm):
        return norm.add(branch, x)
    x = x + branch
    return x, norm(x)


# ---- steps of several streams: those above on one of them, or one of these


def _of_streams(step: Step) -> Run:
    if (own := _OF_STREAMS.get(step.does)) is not None:
        return partial(own, step)
    return partial(_on, step.on, _OF_A_STREAM[step.does](step, None))


def _on(name: str, run: Run, streams: Streams, parts: Parts) -> None:
    run(streams.of[name], parts)


def _modulated_norm(step: Step, streams: Streams, parts: Parts) -> None:
    s, part, given = streams.of[step.on], parts.get(step.part), ()
    if step.by:
        given = streams.given(step.on, step.by)  # type: ignore[assignment]
    if part is None:
        s.y = s.x
    elif len(given) == 1:
        s.y = direct(part, s.x) + given[0][:, None]
    else:
        s.y = part(s.x, *given) if given else direct(part, s.x)


def _attended(step: Step, streams: Streams, parts: Parts) -> None:
    s, part, values = streams.of[step.on], parts[step.part], streams.values
    over = streams.of[step.over].x if step.over in streams.of else values.get(step.over)
    attended = part.attended if has_no_hooks(part) else part.called
    s.branch = attended(_taken(s), over, values.get(TEXT_MASK if step.over else MASK), s.branch, values.get(COS_SIN))


def _joint(step: Step, streams: Streams, parts: Parts) -> None:
    first, second = parts[step.on], parts[step.over]
    one, other = streams.of[step.on], streams.of[step.over]
    both = first.over(one.y, second, other.y, streams.values.get(COS_SIN))
    of_one, of_other = both.split([_taken(one).shape[1], _taken(other).shape[1]], dim=1)
    one.branch, other.branch = first.projected(of_one), second.projected(of_other)


def _mlp_with(step: Step, streams: Streams, parts: Parts) -> None:
    """branch + mlp(y), computed in its last product if the MLP has no hooks."""
    s, mlp = streams.of[step.on], parts[step.part]
    y = _taken(s)
    if s.branch is None:
        s.branch = direct(mlp, y)
    else:
        s.branch = mlp.fused(y, None, s.branch) if has_no_hooks(mlp) else s.branch + mlp(y)


def _gated_add(step: Step, streams: Streams, parts: Parts) -> None:
    s = streams.of[step.on]
    s.x = streams.gated_add(s.branch, *streams.given(step.on, step.by), s.x) if step.by else s.x + s.branch
    s.branch = None


def _gated_add_norm(step: Step, streams: Streams, parts: Parts) -> None:
    s, part = streams.of[step.on], parts[step.part]
    if step.by:
        s.x, s.y = part.add(s.branch, s.x, *streams.given(step.on, step.by))
    else:
        s.x, s.y = _added(part, s.branch, s.x)
    s.branch = None


def _take_alone(step: Step, streams: Streams, parts: Parts) -> None:
    s = streams.of[step.on]
    s.x, s.branch = s.branch, None


def _embed(step: Step, streams: Streams, parts: Parts) -> None:
    values = streams.values
    values[TIME] = parts[step.part].emb(values[TIME], values[step.over], streams.of[step.on].x.dtype)


def _modulate(step: Step, streams: Streams, parts: Parts) -> None:
    streams.vectors = parts[step.part](streams.values[TIME])


def _skip(step: Step, streams: Streams, parts: Parts) -> None:
    s = streams.of[step.on]
    s.x = parts[step.part](s.x, streams.values[SKIP])


def _cat(step: Step, streams: Streams, parts: Parts) -> None:
    streams.of[step.on].x = torch.cat((streams.of[step.over].x, streams.of[step.on].x), dim=1)


def _split(step: Step, streams: Streams, parts: Parts) -> None:
    one, other = streams.of[step.over], streams.of[step.on]
    length = one.x.shape[1]
    one.x, other.x = other.x[:, :length], other.x[:, length:]


def _clip(step: Step, streams: Streams, parts: Parts) -> None:
    s = streams.of[step.on]
    s.x = s.x.clip(-LARGEST, LARGEST) if s.x.dtype == torch.float16 else s.x


def _end(step: Step, streams: Streams, parts: Parts) -> None:
    streams.of[step.on].x = None


def _taken(s: Stream) -> Tensor:
    """y, whose memory is not needed any more."""
    y, s.y = s.y, None
    return y


_OF_STREAMS: Mapping[str, Callable[[Step, Streams, Parts], None]] = MappingProxyType(
    {
        NORM: _modulated_norm,
        ATTENTION: _attended,
        JOINT: _joint,
        MLP: _mlp_with,
        ADD: _gated_add,
        ADD_NORM: _gated_add_norm,
        TAKE: _take_alone,
        EMBED: _embed,
        MODULATE: _modulate,
        SKIP: _skip,
        CAT: _cat,
        SPLIT: _split,
        CLIP: _clip,
        END: _end,
    }
)
