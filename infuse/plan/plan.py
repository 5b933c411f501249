"""Plan: the decision for one model, and its text and HTML.

Rows that differ only in one number of their path are printed as one: `layers.{0-15}`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape

import torch

from infuse.ops.op import DEQUANTIZED
from infuse.parallel.mesh import ONE, Mesh
from infuse.plan.candidates import Candidate, Site
from infuse.plan.digest import digest_of
from infuse.plan.formats import matrix_name
from infuse.plan.found import grouped
from infuse.plan.step import OUTSIDE, Left, Step
from infuse.plan.stored import NOTHING_STORED, StoredFormats, in_words

# A plan's text ends with an explanation of the words in it.
_WORDS = {
    "block": "a whole layer, replaced by ours",
    "module": "a whole module of diffusers, replaced by ours",
    "split": "a layer whose linears ranks share, in its own forward",
    "linear": "one linear, replaced by ours",
    "embedding": "a table, replaced by ours",
    "experts": "all experts of a layer, replaced by ours; what chooses among them stays",
    "attention": "only the attention of layers that stay",
    "left": "stays as it was",
    "declined": "kernels that cannot run here",
    "cache": "keys and values that generate keeps",
}
# Each depth of the steps, for one and for several.
_DEPTHS = {
    "block": ("whole layer", "whole layers"),
    "module": ("whole module", "whole modules"),
    "split": ("layer shared by ranks", "layers shared by ranks"),
    "linear": ("linear", "linears"),
    "embedding": ("table", "tables"),
    "experts": ("set of experts", "sets of experts"),
    "attention": ("attention function", "attention functions"),
}
_KERNELS = {
    "triton": "infuse's for NVIDIA GPUs",
    "cpu": "infuse's in C++",
    "torch": "PyTorch's fused ones",
    **dict.fromkeys(DEQUANTIZED, "PyTorch's own product with weights that were dequantized once"),
    "reference": "PyTorch's plain operations",
}


@dataclass(frozen=True, repr=False)
class Plan:
    """The decision for one model on one device, for one rank of `mesh`.

    `before_bytes` and `after_bytes` count parameters and buffers; the latter include `mapped_bytes` of mapped experts.
    `kv_cache`: format of our cache (None: `dtype`). `token_bytes`: bytes per cached token in `dtype` and in `kv_cache`.
    `state_bytes`: recurrent state per sequence, independent of its length. `places`: those with further candidates,
    until the plan is proven. `stored`: formats of the checkpoint that the plan was made for. `receipts`: of executed
    steps that were proven before, which is not part of the decision.
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
    mapped_bytes: int = 0
    kv_cache: str | None = None
    token_bytes: tuple[int, int] = (0, 0)
    state_bytes: int = 0
    places: tuple[Site, ...] = field(default=(), compare=False)
    stored: StoredFormats = NOTHING_STORED
    receipts: tuple[str, ...] = field(default=(), compare=False)

    def digest(self) -> str:
        """Fingerprint of the decision, equal on all ranks with the same decision."""
        steps = [
            (s.path, s.depth, s.layer, s.whole or s.shape, s.formats, s.bodies, s.why, s.skips_padding, sorted(s.exact),
             *filter(None, [sorted(s.ordered)]))
            for s in self.steps
        ]  # fmt: skip
        return digest_of(steps, self.left, str(self.dtype), self.mesh.at(0), *filter(None, (self.kv_cache,)))

    def executed(
        self,
        steps: Iterable[Step],
        refused: Iterable[Left],
        instead: Sequence[Candidate],
        after_bytes: int,
        notes: Iterable[str] = (),
    ) -> Plan:
        """Return the plan as executed: `steps`, some of them from candidates taken `instead` of `refused` ones."""
        left = [*self.left, *refused, *(left for candidate in instead for left in candidate.left)]
        declined = [*self.declined, *(kernel for candidate in instead for kernel in candidate.declined)]
        steps = tuple(steps)
        return replace(
            self,
            steps=steps,
            left=tuple(dict.fromkeys(left)),
            declined=tuple(dict.fromkeys(declined)),
            notes=tuple(dict.fromkeys((*self.notes, *notes))),
            after_bytes=after_bytes,
            kv_cache=self.kv_cache if any(step.decodes for step in steps) else None,
            places=(),
        )

    def close(self) -> None:
        """Release the model, which is kept to decide further candidates."""
        for place in self.places:
            place.close()

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def __repr__(self) -> str:
        counts = Counter(step.depth for step in self.steps)
        steps = ", ".join(f"{count} {depth}" for depth, count in counts.items()) or "nothing is replaced"
        return f"<{title(self)}: {steps}; {len(self.left)} left; {memory(self)}>"

    def _repr_html_(self) -> str:
        """One table, with a row for each line of the text."""
        body = "".join(
            "<tr>" + "".join(f'<td style="text-align:left">{escape(cell)}</td>' for cell in row) + "</tr>"
            for row in (*_first_rows(self), *_step_rows(self), *_other_rows(self))
        )
        words = "<br>".join(escape(line) for line in _legend(self))
        head = "".join(f'<th style="text-align:left">{name}</th>' for name in ("", "module", "what and why", "kernels"))
        return (
            f"<table><caption>{escape(title(self))}</caption><thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table><p>{words}</p>"
        )


def _lines(plan: Plan) -> Iterator[str]:
    yield title(plan)
    for kind, _, what, _ in _first_rows(plan):
        yield f"  {kind:<8}  {what}"
    rows = _step_rows(plan)
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
    for depth, path, why, bodies in rows:
        yield f"  {depth:<{widths[0]}}  {path:<{widths[1]}}  {why}"
        yield f"  {'':<{widths[0]}}  {bodies}"
    if not rows:
        yield "  nothing is replaced"
    for kind, path, why, body in _other_rows(plan):
        where, by = f"{path}: " if path else "", f"{body}, " if body else ""
        yield f"  {kind}  {where}{by}{why}"
    for line in _legend(plan):
        yield f"  {line}"


def title(plan: Plan) -> str:
    dtype = str(plan.dtype).removeprefix("torch.")
    ranks = f", {plan.mesh}" if plan.mesh.size > 1 else ""
    return f"plan for {plan.model} on {plan.device}{ranks}: {dtype} ({plan.dtype_why})"


def _first_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Say what is gained: how much is replaced, and the memory before and after."""
    counts = Counter(step.depth for step in plan.steps)
    if counts:
        yield "replaced", "", ", ".join(f"{count} {_DEPTHS[depth][count > 1]}" for depth, count in counts.items()), ""
    yield "memory", "", memory(plan), ""


def _step_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Depth, path, formats and reason, bodies of the steps."""
    rows = []
    for step in plan.steps:
        skips = "; rows of padding are skipped: their output is zero" if step.skips_padding else ""
        by_body: dict[str, list[str]] = {}
        for name, body in step.bodies:
            by_body.setdefault(body, []).append(name)
        bodies = "; ".join(f"{body}: {', '.join(names)}" for body, names in by_body.items())
        rows.append((step.depth, step.path, f"{_formats_text(step)}{step.why}{skips}", bodies))
    return grouped(rows)


def _other_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Kind, path, text and body of the modules left alone, of declined bodies, of notes and of the memory."""
    yield from grouped([("left", left.path, left.why, "") for left in plan.left if left.why != OUTSIDE])
    if outside := grouped([("", left.path) for left in plan.left if left.why == OUTSIDE]):
        yield "left", "", f"tables and norms outside of replaced layers: {', '.join(path for _, path in outside)}", ""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for name, body, reason in plan.declined:
        by_reason.setdefault((body, reason), []).append(name)
    for (body, reason), names in by_reason.items():
        yield "declined", "", f"for {', '.join(names)}: {reason}", body
    for note in plan.notes:
        yield "note", "", note, ""
    if plan.receipts:
        yield "proven", "", f"before, with the same code, settings and values: {'; '.join(plan.receipts)}", ""
    if plan.kv_cache:
        plain, coded = (f"{count / 1e3:,.1f} kB" for count in plan.token_bytes)
        dtype = str(plan.dtype).removeprefix("torch.")
        others = f"caches that you pass and continuous batching keep {dtype}"
        yield "cache", "", f"{plan.kv_cache}, {coded} a token instead of {plain} in {dtype}; {others}", ""
    if plan.state_bytes:
        yield "states", "", f"{plan.state_bytes / 1e3:,.1f} kB for each text in float32, however long it is", ""


def memory(plan: Plan) -> str:
    text = f"{plan.before_bytes / 1e6:,.1f} MB -> {plan.after_bytes / 1e6:,.1f} MB"
    if not plan.mapped_bytes:
        return text
    resident, mapped = plan.after_bytes - plan.mapped_bytes, plan.mapped_bytes
    return f"{text}: {resident / 1e6:,.1f} MB resident, {mapped / 1e6:,.1f} MB of experts mapped from their file"


def _legend(plan: Plan) -> list[str]:
    """Up to two lines that explain the words and the kernels in the plan."""
    used = {step.depth for step in plan.steps} | {row[0] for row in _other_rows(plan)}
    bodies = {body for step in plan.steps for _, body in step.bodies}
    lines = []
    for what, meanings, there in (("words", _WORDS, used), ("kernels", _KERNELS, bodies)):
        if told := "; ".join(f"{word}: {meaning}" for word, meaning in meanings.items() if word in there):
            lines.append(f"{what}  {told}")
    return lines


def _formats_text(step: Step) -> str:
    """Format each number format with its bytes in one such module, and with its matrices if formats differ."""
    by_format: dict[tuple[str, bool, bool], list[tuple[str, int]]] = {}
    sizes = {target: size for target, _, size in step.matrices}
    for fill, _ in step.made:
        if fill.format:
            key = fill.format, fill.as_stored, fill.ordered
            by_format.setdefault(key, []).append((matrix_name(fill), sizes[fill.target]))
    parts = []
    for (format, as_stored, ordered), members in sorted(by_format.items()):
        where = "" if len(members) == len(sizes) else f" for {' and '.join(name for name, _ in members)}"
        taken = ", taken as it is," if as_stored else ""
        size = sum(size for _, size in members)
        told = f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:,.1f} kB"
        parts.append(f"{in_words(format, ordered=ordered)}{where}{taken} {told}, ")
    return "".join(parts)


class Report(str):
    """Text of a report; notebooks show its plan as a table."""

    _html: str

    @classmethod
    def of(cls, plan: Plan, rest: Iterable[str]) -> Report:
        lines = list(rest)
        report = cls("\n".join([str(plan), *lines]))
        rest = "\n".join(lines)
        report._html = f"{plan._repr_html_()}<pre>{escape(rest)}</pre>"
        return report

    @classmethod
    def of_several(cls, reports: Mapping[str, Report], rest: str) -> Report:
        """Join the reports of several models by name, and add a last line."""
        report = cls("\n".join([*(f"{name}: {text}" for name, text in reports.items()), rest]))
        parts = [f"<h4>{escape(name)}</h4>{model_report._repr_html_()}" for name, model_report in reports.items()]
        report._html = "".join([*parts, f"<pre>{escape(rest)}</pre>"])
        return report

    def _repr_html_(self) -> str:
        return self._html
