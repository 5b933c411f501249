"""The interpreters of programs (architectures/program.py), part by part.

`run` has one stream, in three local variables, with caches, attention weights and ranks' sums of parallel branches.
`run_streams` has several streams, modulated by a time step. They have no more in common than a plain norm and an MLP,
and a language model's step of one token should look up no streams.
"""

from __future__ import annotations

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
    REDUCE,
    SKIP,
    SPLIT,
    TAKE,
    TEXT_MASK,
    TIME,
    TURNS,
    Program,
)
from infuse.layers.inputs import Inputs
from infuse.layers.linear import direct, untouched
from infuse.layers.norm import Norm

LARGEST = 65504  # of float16


def run(program: Program, block: Any, attention: nn.Module, x: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Run the program on x. Return the block's output and its attention weights (None unless wanted)."""
    parts: dict[str, Any] = block._modules  # attribute access on an nn.Module takes 0.7 us
    y: Tensor = x
    branch: Any = None  # a tensor once a part has run
    weights: Tensor | None = None
    for does, name, scale, norm, *_ in program:
        if does == NORM:
            y = direct(parts[name], x)
        elif does == ATTENTION:
            made, weights = attention(y, inputs)
            branch = made if branch is None else branch + made
        elif does == MLP:
            made = direct(parts[name], y)
            branch = made if branch is None else branch + made
        elif does == FOLDED_ATTENTION:
            branch, weights = attention.forward(x, inputs, parts[norm] if norm else None, branch)
        elif does == FOLDED_MLP:
            branch = parts[name].fused(x, parts[norm] if norm else None, branch)
        elif does == CARRY:
            branch = x
        elif does == NORM_BRANCH:
            branch = direct(parts[name], branch)
        elif does == REDUCE:
            branch = block.reduce(branch)
        else:  # add the branch to the stream
            if scale != 1.0:
                branch = branch * scale
            if does == ADD_NORM:
                x, y = _added(parts[name], branch, x)
            elif does == ADD_NORM_STREAM:
                x = y = _added(parts[name], branch, x)[1]
            else:
                x = y = branch if does == TAKE else x + branch
            branch = None
    return x, weights


def _added(norm: nn.Module, branch: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
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
            values[on], y[on] = _added(part, branch.pop(on), x)
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
