"""The residual shapes as programs, and the interpreter that runs a block's program part by part.

PRE                POST               PARALLEL             SANDWICH
x ----+            x ----+            x --+------+----+    x ----+
norm1 |            attn  |            norm1    norm2  |    norm1 |        (PARALLEL without norm2 feeds
attn  |              + --+            attn      mlp   |    attn  |         both from norm1; SANDWICH may
  + --+            norm1               +---------+----+    post1 |         lack norm1 and norm2)
x ----+            x ----+                                   + --+
norm2 |            mlp   |                                 x ----+
mlp   |              + --+                                 norm2, mlp, post2 likewise
  + --+            norm2

A program works on three values: `x`, the residual stream; `y`, what the next attention or MLP reads; and `branch`, the
sum of what these made since the last ADD. Two peepholes fuse neighbouring steps: `merged` an ADD with the norm after
it, `folded` norms and sums with the products beside them. C++ runs merged programs too: ops/cpu/src/binding_layer.h.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn

from infuse.architectures.layer import PARALLEL, POST, PRE, SANDWICH, LayerShape
from infuse.layers.inputs import Inputs
from infuse.layers.linear import direct, untouched
from infuse.layers.norm import Norm

NORM, NORM_STREAM, NORM_BRANCH = "norm", "norm_stream", "norm_branch"  # y = norm(x); x = y = norm(x); of the branch
ATTENTION, MLP = "attention", "mlp"  # branch += part(y)
ADD = "add"  # x = y = x + branch, and the next branch begins
REDUCE = "reduce"  # the sum of all ranks' branches
ADD_NORM, ADD_NORM_STREAM = "add_norm", "add_norm_stream"  # by `merged`
# By `folded`: branch = branch + part(norm(x)); branch = x; x = y = branch, and the next branch begins.
FOLDED_ATTENTION, FOLDED_MLP, CARRY, TAKE = "folded_attention", "folded_mlp", "carry", "take"


class Step(NamedTuple):
    """`part` is the block's child that runs, `scale` is by how much ADD multiplies the branch, `norm` is folded in."""

    does: str
    part: str = ""
    scale: float = 1.0
    norm: str = ""


Program = tuple[Step, ...]

_NORM1, _NORM2 = Step(NORM, "norm1"), Step(NORM, "norm2")
_ATTENTION, _MLP, _ADD = Step(ATTENTION), Step(MLP, "mlp"), Step(ADD)
_PROGRAMS: Mapping[str, Program] = MappingProxyType({
    PRE: (_NORM1, _ATTENTION, _ADD, _NORM2, _MLP, _ADD),
    POST: (_ATTENTION, _ADD, Step(NORM_STREAM, "norm1"), _MLP, _ADD, Step(NORM_STREAM, "norm2")),
    PARALLEL: (_NORM1, _ATTENTION, _NORM2, _MLP, Step(REDUCE), _ADD),
    SANDWICH: (
        _NORM1, _ATTENTION, Step(NORM_BRANCH, "post1"), _ADD, _NORM2, _MLP, Step(NORM_BRANCH, "post2"), _ADD,
    ),
})  # fmt: skip


def program_of(shape: LayerShape, ranks: int = 1) -> Program:
    """The steps of a block, without the norms that it does not have. Only PARALLEL adds up ranks itself, both branches
    at once.
    """
    absent = {name for name in ("norm1", "norm2", "post1", "post2") if getattr(shape, name) is None}
    return tuple(
        step._replace(scale=shape.residual_scale) if step.does == ADD else step
        for step in _PROGRAMS[shape.residual]
        if step.part not in absent and (step.does != REDUCE or ranks > 1)
    )


def merged(program: Program) -> Program:
    """Each ADD and the norm after it in one step."""
    steps: list[Step] = []
    for step in program:
        if steps and steps[-1].does == ADD and step.does in (NORM, NORM_STREAM):
            does = ADD_NORM if step.does == NORM else ADD_NORM_STREAM
            step = Step(does, step.part, steps.pop().scale)
        steps.append(step)
    return tuple(steps)


def folded(program: Program) -> Program:
    """Norms within the products that read them; an ADD within the products before it, where these alone make the
    branch and no norm reads the sum in their place.
    """
    steps: list[Step] = []
    norm, begin = "", 0  # what products read; where the branch begins in `steps`
    for i, step in enumerate(program):
        if step.does == NORM:
            norm = step.part
        elif step.does in (ATTENTION, MLP):
            does = FOLDED_ATTENTION if step.does == ATTENTION else FOLDED_MLP
            steps.append(step._replace(does=does, norm=norm))
        elif step.does == ADD:
            products_alone = all(made.does in (FOLDED_ATTENTION, FOLDED_MLP) for made in steps[begin:])
            normed = i + 1 < len(program) and program[i + 1].does == NORM_STREAM
            if products_alone and not normed and step.scale == 1.0:
                steps[begin:] = [Step(CARRY), *steps[begin:], Step(TAKE)]
            else:
                steps.append(step)
            norm, begin = "", len(steps)
        else:
            steps.append(step)
    return tuple(steps)


def run(program: Program, block: Any, attention: nn.Module, x: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """The block's output and the weights of its attention."""
    parts: dict[str, Any] = block._modules  # attribute access on an nn.Module costs 0.7 us each time
    y: Tensor = x
    branch: Any = None  # a tensor as soon as a part ran
    weights: Tensor | None = None
    for does, name, scale, norm in program:
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
        else:  # the branch joins the stream
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
    """The sum and its norm, in one pass where nobody listens to the norm."""
    if type(norm) is Norm and untouched(norm):
        return norm.add(branch, x)
    x = x + branch
    return x, norm(x)
