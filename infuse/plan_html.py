"""A plan and a report as notebooks show them: the rows of plan_text.py as an HTML table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from typing import TYPE_CHECKING

from infuse.plan_text import declined_rows, left_rows, legend, memory, step_rows, title

if TYPE_CHECKING:
    from infuse.plan import Plan


class Report(str):
    """The text of a report; notebooks show its plan as a table."""

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
    """The plan as one table, a row for each line of its text."""
    body = "".join(
        "<tr>" + "".join(f'<td style="text-align:left">{escape(cell)}</td>' for cell in row) + "</tr>" for row in _rows(plan)
    )
    words = "<br>".join(escape(line) for line in legend(plan))
    head = "".join(f'<th style="text-align:left">{name}</th>' for name in ("", "module", "what and why", "kernels"))
    return f"<table><caption>{escape(title(plan))}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{words}</p>"


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
