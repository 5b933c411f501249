"""A plan as text: the table that users read. Rows that differ in a number of their path alone are told as one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from infuse.ops.op import DEQUANTIZED

if TYPE_CHECKING:
    from infuse.plan import Plan, Step


# The words of a plan that occur in it are explained below it.
_WORDS = {
    "block": "a whole layer, replaced by ours",
    "split": "a layer whose linears ranks share, in its own forward",
    "linear": "one linear, replaced by ours",
    "embedding": "a table, replaced by ours",
    "attention": "only the attention of layers that stay",
    "left": "stays as it was",
    "declined": "kernels that cannot run here",
}
_KERNELS = {
    "triton": "infuse's for NVIDIA GPUs",
    "cpu": "infuse's in C++",
    "torch": "PyTorch's fused ones",
    **dict.fromkeys(DEQUANTIZED, "PyTorch's own product with weights that were dequantized once"),
    "reference": "PyTorch's plain operations",
}


def plan_lines(plan: Plan) -> Iterator[str]:
    """The lines of the table: what is replaced, what is left, who declined, notes, memory, and what the words mean."""
    yield title(plan)
    rows = step_rows(plan)
    if rows:
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        for depth, path, formats, bodies, why in rows:
            yield f"  {depth:<{widths[0]}}  {path:<{widths[1]}}  {formats}{why}"
            yield f"  {'':<{widths[0]}}  {bodies}"
    else:
        yield "  nothing is replaced"
    for path, why in left_rows(plan):
        yield f"  left  {path}: {why}" if path else f"  left  {why}"
    for body, names, reason in declined_rows(plan):
        yield f"  declined  {body}, for {names}: {reason}"
    for note in plan.notes:
        yield f"  note  {note}"
    yield f"  memory  {memory(plan)}"
    for line in legend(plan):
        yield f"  {line}"


def title(plan: Plan) -> str:
    dtype = str(plan.dtype).removeprefix("torch.")
    ranks = f", {plan.mesh}" if plan.mesh.size > 1 else ""
    return f"plan for {plan.model} on {plan.device}{ranks}: {dtype} ({plan.dtype_why})"


def step_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Depth, path, formats, bodies and reason of the steps."""
    return grouped([(step.depth, step.path, *_step_text(step)) for step in plan.steps])


def left_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Path and reason."""
    return grouped([(left.path, left.why) for left in plan.left], path_column=0)


def declined_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """Body, the ops that it declined, and the reason."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for name, body, reason in plan.declined:
        by_reason.setdefault((body, reason), []).append(name)
    return [(body, ", ".join(names), reason) for (body, reason), names in by_reason.items()]


def memory(plan: Plan) -> str:
    return f"{plan.before_bytes / 1e6:,.1f} MB -> {plan.after_bytes / 1e6:,.1f} MB"


def legend(plan: Plan) -> list[str]:
    """The meaning of the words and of the kernels that the plan names, a line for each."""
    used = {step.depth for step in plan.steps} | ({"left"} if plan.left else set()) | ({"declined"} if plan.declined else set())
    bodies = {body for step in plan.steps for _, body in step.bodies}
    lines = []
    for what, meanings, there in (("words", _WORDS, used), ("kernels", _KERNELS, bodies)):
        if told := "; ".join(f"{word}: {meaning}" for word, meaning in meanings.items() if word in there):
            lines.append(f"{what}  {told}")
    return lines


def _step_text(step: Step) -> tuple[str, str, str]:
    by_body: dict[str, list[str]] = {}
    for name, body in step.bodies:
        by_body.setdefault(body, []).append(name)
    bodies = "; ".join(f"{body}: {', '.join(names)}" for body, names in by_body.items())
    skips = "; rows of padding are skipped: their output is zero" if step.skips_padding else ""
    return (_formats_text(step), bodies, step.why + skips)


def _formats_text(step: Step) -> str:
    """Each format with the bytes that it takes in one such module, and with its matrices where not all are alike."""
    by_format: dict[str, list[tuple[str, int]]] = {}
    for target, format, size in step.matrices:
        if format:
            by_format.setdefault(format, []).append((target.removesuffix(".weight"), size))
    parts = []
    for format, members in sorted(by_format.items()):
        where = "" if len(members) == len(step.matrices) else f" for {' and '.join(name for name, _ in members)}"
        parts.append(f"{format}{where} {_bytes_text(sum(size for _, size in members))}, ")
    return "".join(parts)


def _bytes_text(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:,.1f} kB"


def grouped(rows: Sequence[tuple[str, ...]], path_column: int = 1) -> list[tuple[str, ...]]:
    """Rows that are alike but for a number in their path, as one row: layers.{0-15}.mlp."""
    groups: dict[tuple, list[str]] = {}
    for row in rows:
        template = re.sub(r"(?<=\.)\d+(?=\.|:|$)", "#", row[path_column], count=1)
        numbers = groups.setdefault((*row[:path_column], template, *row[path_column + 1 :]), [])
        numbers += re.findall(r"(?<=\.)\d+(?=\.|:|$)", row[path_column])[:1]
    out = []
    for row, numbers in groups.items():
        path = row[path_column].replace("#", _ranges([int(n) for n in numbers]), 1)
        out.append((*row[:path_column], path, *row[path_column + 1 :]))
    return out


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as {0-2,5}; a single number as itself."""
    if len(numbers) == 1:
        return str(numbers[0])
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return "{" + ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in spans) + "}"
