"""Programs for the residual shapes, and the interpreter that runs a block's program part by part.

PRE                POST               PARALLEL             SANDWICH
x ----+            x ----+            x --+------+----+    x ----+
norm1 |            attn  |            norm1    norm2  |    norm1 |        (PARALLEL without norm2 feeds
attn  |              + --+            attn      mlp   |    attn  |         both from norm1; SANDWICH may
  + --+            norm1               +---------+----+    post1 |         lack norm1 and norm2)
x ----+            x ----+                                   + --+
norm2 |            mlp   |                                 x ----+
mlp   |              + --+                                 norm2, mlp, post2 likewise
  + --+            norm2

A program works on three values: `x`, the residual stream; `y`, the input of the next attention or MLP; and `branch`,
the sum of their outputs since the last ADD. Two peephole passes fuse neighbouring steps: `merged` fuses an ADD with the
norm after it, `folded` fuses norms and sums with adjacent products. C++ also runs merged programs:
ops/cpu/src/binding_layer.h.
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

# y = norm(x); x = y = norm(x); branch = norm(branch)
NORM, NORM_STREAM, NORM_BRANCH = "norm", "norm_stream", "norm_branch"
ATTENTION, MLP = "attention", "mlp"  # branch += part(y)
ADD = "add"  # x = y = x + scale * branch; start a new branch
REDUCE = "reduce"  # branch = sum of all ranks' branches
ADD_NORM, ADD_NORM_STREAM = "add_norm", "add_norm_stream"  # made by `merged`
# Made by `folded`: branch = branch + part(norm(x)) (both FOLDED_ steps); branch = x; x = y = branch and a new branch.
FOLDED_ATTENTION, FOLDED_MLP, CARRY, TAKE = "folded_attention", "folded_mlp", "carry", "take"


class Step(NamedTuple):
    """`part` names the block's child that runs, ADD multiplies the branch by `scale`, and `norm` is folded in."""

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
    """Return the steps of a block, leaving out norms that it does not have.

    Only PARALLEL reduces over ranks as a step of its own, for both branches at once.
    """
    absent = {name for name in ("norm1", "norm2", "post1", "post2") if getattr(shape, name) is None}
    return tuple(
        step._replace(scale=shape.residual_scale) if step.does == ADD else step
        for step in _PROGRAMS[shape.residual]
        if step.part not in absent and (step.does != REDUCE or ranks > 1)
    )


def merged(program: Program) -> Program:
    """Merge each ADD and the norm after it into one step."""
    steps: list[Step] = []
    for step in program:
        if steps and steps[-1].does == ADD and step.does in (NORM, NORM_STREAM):
            does = ADD_NORM if step.does == NORM else ADD_NORM_STREAM
            step = Step(does, step.part, steps.pop().scale)
        steps.append(step)
    return tuple(steps)


def folded(program: Program) -> Program:
    """Fold norms into the products that read them, and each ADD into the products before it.

    An ADD is folded only if products alone made its branch, the branch is not scaled and no NORM_STREAM follows.
    """
    steps: list[Step] = []
    norm, begin = "", 0  # the norm that products read; index in `steps` where the branch begins
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
    """Run the program on x. Return the block's output and its attention weights (None unless wanted)."""
    parts: dict[str, Any] = block._modules  # attribute access on an nn.Module takes 0.7 us
    y: Tensor = x
    branch: Any = None  # a tensor once a part has run
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
