"""Programs: a block as a list of steps, for the residual shapes and, in specs, for blocks of several streams.

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
the sum of their outputs since the last ADD. A block of a diffusion transformer has them for each of its streams.
Peephole passes fuse neighbouring steps: `merged` fuses an ADD with the norm after it, `folded` and `carried` fuse norms
and sums with adjacent products. layers/program.py runs programs; C++ also runs merged ones of one stream:
ops/cpu/src/binding_layer.h.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from infuse.architectures.part import PartShape, ShapeOfParts

if TYPE_CHECKING:
    from typing_extensions import Self

PRE, POST, PARALLEL, SANDWICH = "pre", "post", "parallel", "sandwich"

# y = norm(x); x = y = norm(x); branch = norm(branch)
NORM, NORM_STREAM, NORM_BRANCH = "norm", "norm_stream", "norm_branch"
ATTENTION, MLP = "attention", "mlp"  # branch += part(y)
ADD = "add"  # x = y = x + scale * branch; start a new branch
REDUCE = "reduce"  # branch = sum of all ranks' branches
ADD_NORM, ADD_NORM_STREAM = "add_norm", "add_norm_stream"  # made by `merged`
# y = norm(x) with x in the dtype of the norm's weight; x = y = x in float32 + branch: a stream wider than the parts.
NORM_NARROWED, ADD_WIDE = "norm_narrowed", "add_wide"
NORM_OF_WIDE = "norm_of_wide"  # y = norm(x), in the dtype of the norm's weight
# In float16 alone: x between -scale and scale, always, or where some value is not finite.
CLAMP, CLAMP_INFINITE = "clamp", "clamp_infinite"
# Made by `folded`: branch = branch + part(norm(x)) (both FOLDED_ steps); branch = x; x = y = branch and a new branch.
FOLDED_ATTENTION, FOLDED_MLP, CARRY, TAKE = "folded_attention", "folded_mlp", "carry", "take"


# Steps of blocks of several streams only.
EMBED = "embed"  # time step = part.emb(time step, label)
MODULATE = "modulate"  # vectors = part(time step)
JOINT = "joint"  # attention over two streams in order, by the parts of their names
CAT, SPLIT = "cat", "split"  # x of `on` = [x of `over`, x]; [x of `over`, x] = x of `on`
SKIP = "skip"  # x = part(x, the value SKIP)
CLIP, END = "clip", "end"  # in float16, clamp x to its range; drop the stream

# Values of such blocks: streams, and the other arguments of a call. UNREAD: the original ignores it. EMPTY: a dict in
# which no key is supported.
IMAGE, TEXT = "image", "text"
TIME, LABEL, COS_SIN, MASK, TEXT_MASK = "time", "label", "turns", "mask", "text mask"
UNREAD, EMPTY = "unread", "empty"


class Step(NamedTuple):
    """`part` names the block's child that runs, ADD multiplies the branch by `scale`, and `norm` is folded in.

    With several streams, `on` is the stream that the step changes. Attention goes `over` another value of the call: a
    stream, or the states of an encoder. A norm over a value is that of x + value, or of x where None is passed. An MLP
    over MASK is given the layer's mask, too. `by`
    are indices of the stream's vectors, if a time step modulates it: scale and shift of a norm, the gate of an ADD. A
    NORM without a part is y = x, and ADD leaves y alone.
    """

    does: str
    part: str = ""
    scale: float = 1.0
    norm: str = ""
    on: str = ""
    by: tuple[int, ...] = ()
    over: str = ""


Program = tuple[Step, ...]

NORMS = ("norm1", "norm2", "post1", "post2")
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


def program_of(residual: str, mixer: str, absent: Collection[str] = (), scale: float = 1.0) -> Program:
    """Return the steps of a layer with this residual shape. `mixer` is the name of its attention or recurrence.

    `absent` are norms that it does not have, and perhaps its MLP; `scale` multiplies each branch.
    """
    return _of_branches(
        step._replace(part=mixer if step.does == ATTENTION else step.part, scale=scale if step.does == ADD else 1.0)
        for step in _PROGRAMS[residual]
        if step.part not in absent
    )


def _of_branches(steps: Iterable[Step]) -> Program:
    """Without the ADDs of branches that no part has made."""
    kept: list[Step] = []
    made = False
    for step in steps:
        if step.does != ADD or made:
            kept.append(step)
            made = step.does != ADD and (made or step.does in (ATTENTION, MLP))
    return tuple(kept)


def without_branch(program: Program, part: str) -> Program:
    """The steps without the branch of this attention: its norm, before it or after its sum, goes with it."""
    at = next(place for place, step in enumerate(program) if step.part == part)
    first = at - 1 if at and program[at - 1].does == NORM else at
    return (*program[:first], *program[first + 3 :])


def on_ranks(program: Program, ranks: int) -> Program:
    """The program for this number of ranks. Parts sum their outputs over ranks, unless the program reduces branches."""
    return tuple(step for step in program if step.does != REDUCE or ranks > 1)


def reduces(program: Program) -> bool:
    """Whether a REDUCE sums the branches over ranks, so that parts do not."""
    return any(step.does == REDUCE for step in program)


def merged(program: Program) -> Program:
    """Merge each ADD and the norm after it into one step, unless a time step modulates only one of them."""
    steps: list[Step] = []
    for step in program:
        last = steps[-1] if steps else None
        if last is not None and last.does == ADD and step.does in (NORM, NORM_STREAM) and _fit(last, step):
            does = ADD_NORM if step.does == NORM else ADD_NORM_STREAM
            step = step._replace(does=does, scale=steps.pop().scale, by=(*last.by, *step.by))
        steps.append(step)
    return tuple(steps)


def _fit(add: Step, norm: Step) -> bool:
    return add.on == norm.on and bool(norm.part) and not norm.over and bool(add.by) == bool(norm.by)


def carried(program: Program) -> Program:
    """Fold each ADD without a gate into the product just before it: the branch begins as x, and becomes x."""
    steps: list[Step] = []
    for step in program:
        last = steps[-1] if steps else None
        if step.does == ADD and not step.by and last is not None and last.does in (ATTENTION, MLP):
            steps[-1:] = [Step(CARRY, on=step.on), last, Step(TAKE, on=step.on)]
        else:
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


@dataclass(frozen=True)
class ProgramShape(ShapeOfParts):
    """A block: its steps, and its parts by name, as the steps name them."""

    program: Program
    held: tuple[tuple[str, PartShape], ...]

    @property
    def parts(self) -> Mapping[str, PartShape]:
        return dict(self.held)

    def with_parts(self, parts: Mapping[str, PartShape]) -> Self:
        return replace(self, held=tuple((name, parts.get(name, part)) for name, part in self.held))

    @property
    def ops(self) -> tuple[str, ...]:
        """Those of its parts, and of the sums before norms and with gates; without those of linears."""
        steps, parts = merged(self.program), self.parts
        norms = [parts[step.part] for step in steps if step.does in (ADD_NORM, ADD_NORM_STREAM) and not step.by]
        sums = [each for norm in norms for name in norm.ops for each in (name, f"add_{name}")]
        gated = ["gated_add"] if any(step.does == ADD and step.by for step in steps) else []
        return tuple(dict.fromkeys((*sums, *super().ops, *gated)))
