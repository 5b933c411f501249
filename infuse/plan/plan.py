"""Plan: the decision for one model, and its text and HTML.

Rows that differ only in one number of their path are printed as one: `layers.{0-15}`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from html import escape

import torch

from infuse.ops.op import DEQUANTIZED
from infuse.parallel.mesh import ONE, Mesh
from infuse.plan.found import grouped
from infuse.plan.step import Left, Step

# A plan's text ends with an explanation of the words in it.
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


@dataclass(frozen=True)
class Plan:
    """The decision for one model on one device, for one rank of `mesh`.

    `before_bytes` and `after_bytes` count parameters and buffers.
    """

    model: str
    device: str
    dtype: torch.dtype
    dtype_why: str
    steps: tuple[Step, ...]
    left: tuple[Left, ...]
    declined: tuple[tuple[str, str, str], ...]
    notes: tuple[str, ...]
    before_bytes: int
    after_bytes: int
    mesh: Mesh = ONE

    def digest(self) -> str:
        """Fingerprint of the decision, equal on all ranks that decided alike."""
        steps = [
            (
                step.path,
                step.depth,
                step.layer,
                step.whole or step.shape,
                step.formats,
                step.bodies,
                step.why,
                step.skips_padding,
            )
            for step in self.steps
        ]
        return hashlib.sha256(repr((steps, self.left, str(self.dtype), self.mesh.tp)).encode()).hexdigest()[:16]

    def with_left(
        self, left: Iterable[Left], steps: Iterable[Step], after_bytes: int, notes: Iterable[str] = ()
    ) -> Plan:
        return replace(
            self, left=(*self.left, *left), steps=tuple(steps), after_bytes=after_bytes, notes=(*self.notes, *notes)
        )

    def __str__(self) -> str:
        return "\n".join(plan_lines(self))

    def _repr_html_(self) -> str:
        return plan_html(self)


def plan_lines(plan: Plan) -> Iterator[str]:
    """Yield the lines of the text: replacements, modules left alone, declined kernels, notes, memory, a legend."""
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
    """Path and reason of the modules left alone."""
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
    """Up to two lines that explain the words and the kernels in the plan."""
    used = (
        {step.depth for step in plan.steps}
        | ({"left"} if plan.left else set())
        | ({"declined"} if plan.declined else set())
    )
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
    """Each format with its bytes in one such module, and its matrices if formats differ."""
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


class Report(str):
    """Text of a report; notebooks show its plan as a table."""

    _plan: Plan
    _rest: str

    @classmethod
    def of(cls, plan: Plan, rest: Iterable[str]) -> Report:
        lines = list(rest)
        report = cls("\n".join([str(plan), *lines]))
        report._plan, report._rest = plan, "\n".join(lines)
        return report

    def _repr_html_(self) -> str:
        return f"{plan_html(self._plan)}<pre>{escape(self._rest)}</pre>"


def plan_html(plan: Plan) -> str:
    """The plan as one table, with a row for each line of its text."""
    body = "".join(
        "<tr>" + "".join(f'<td style="text-align:left">{escape(cell)}</td>' for cell in row) + "</tr>"
        for row in _rows(plan)
    )
    words = "<br>".join(escape(line) for line in legend(plan))
    head = "".join(f'<th style="text-align:left">{name}</th>' for name in ("", "module", "what and why", "kernels"))
    return (
        f"<table><caption>{escape(title(plan))}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table><p>{words}</p>"
    )


def _rows(plan: Plan) -> Iterator[tuple[str, str, str, str]]:
    for depth, path, formats, bodies, why in step_rows(plan):
        yield depth, path, f"{formats}{why}", bodies
    for path, why in left_rows(plan):
        yield "left", path, why, ""
    for body, names, reason in declined_rows(plan):
        yield "declined", "", f"for {names}: {reason}", body
    for note in plan.notes:
        yield "note", "", note, ""
    yield "memory", "", memory(plan), ""
