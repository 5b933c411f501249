"""Adapt a plan to the index of our shards, for this model on these ranks: the same steps in the same formats.

Nothing is proven or quantized again, so anything that the index does not cover is refused, such as a layer of another
kind or a part that would split a group of inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from infuse import ops
from infuse.architectures.packing import Fill
from infuse.ground.device import Device
from infuse.ground.errors import CheckpointError
from infuse.parallel.slices import Band, Cut, Range, Span, are_along, taken
from infuse.plan.candidates import Candidates
from infuse.plan.formats import matrix_ops
from infuse.plan.packed import packed_paths
from infuse.plan.plan import Plan
from infuse.plan.step import Left, Step
from infuse.quant.format import QuantFormat
from infuse.quant.parse import quant_format
from infuse.shards.index import SavedIndex, SavedStep
from infuse.shards.save import cuts, is_cut_alike, kind_of, kind_of_linear

_INSTEAD = (
    "load the original checkpoint, or shard the model again for so many ranks (`infuse shard MODEL_DIR OUT --tp N`, or "
    "init_inference(..., save_mp_checkpoint_path=FOLDER) on N ranks)"
)


def saved_plan(plan: Plan, model: nn.Module, index: SavedIndex, *, device: Device) -> Plan:
    """Return `plan` adapted to the shards of `index`: each layer at its saved depth, each matrix in its saved format.

    CheckpointError if a layer differs in kind from the saved one, or if this rank's part of a matrix splits a group.
    """
    plan = _at_saved_depth(plan, model, index)
    saved, steps, left = dict(index.steps), list[Step](), list(plan.left)
    for step in plan.steps:
        ordered = _ordered(step, saved)
        formats = _taken_formats(step, saved)
        if formats is not None:
            steps.append(_with_formats(step, formats, ordered, device, plan.dtype))
        elif packed_paths(step):
            left.append(Left(step.path, "as it was saved: not replaced then"))
        else:
            steps.append(step)
    if saved:
        raise CheckpointError(
            f"{len(saved)} layers were saved in a form that is not this version's, or not this model's: "
            f"{', '.join(saved)}; shard the model again"
        )
    plan = replace(plan, steps=tuple(steps), left=tuple(left), dtype_why="as it was saved")
    if faults := _cut_faults(plan, index):
        what = f"the shards of {index.tp_size} ranks cannot be read by {plan.mesh}; {_INSTEAD}"
        raise CheckpointError("\n  ".join([f"{what}:", *faults]))
    return plan


def _at_saved_depth(plan: Plan, model: nn.Module, index: SavedIndex) -> Plan:
    """Return `plan` with each layer at its saved depth; layers that ranks split keep the saved interpretation.

    Only the candidates' steps are used; formats come from the shards.
    """
    steps, left, notes = plan.steps, list(plan.left), plan.notes
    candidates = Candidates(model, steps, plan.places)
    while deeper := [step for step in steps if _is_deeper(step, index)]:
        inside = {step.path: candidate.steps for step, candidate in candidates.after(deeper)}
        steps = tuple(inner for step in steps for inner in inside.get(step.path, [step]))
        whole = [step.path for step in deeper if step.keeps_forward]
        for step in deeper:
            why = "whole on each rank" if step.keeps_forward else "not as a block"
            left.append(Left(step.path, f"as it was saved: {why}"))
        if whole and index.tp_size == 1:
            what = f"{len(whole)} layers are whole on each rank, as one rank saved them, e.g. {whole[0]}"
            notes += (f"{what}; to have ranks share them, {_INSTEAD}",)
    return replace(plan, steps=_as_interpreted(steps, index), left=tuple(left), notes=notes)


def _is_deeper(step: Step, index: SavedIndex) -> bool:
    """True if the layer was saved at a shallower depth: proof failed, a policy applied, or one rank held it whole."""
    if step.keeps_forward:
        return step.path not in index.interpretations
    if not step.is_layer or step.path in index.steps:
        return False
    return step.path in index.interpretations or any(path.startswith(f"{step.path}.") for path in index.steps)


def _as_interpreted(steps: Iterable[Step], index: SavedIndex) -> tuple[Step, ...]:
    """Return the steps, using for layers without a spec the interpretation that the index names."""
    chosen, faults = [], []
    for step in steps:
        readings = [step]
        if step.keeps_forward:
            names = set(index.interpretations[step.path])
            readings = [other for other in (step, *step.others) if not names.isdisjoint(other.interpretations)]
        if len(readings) == 1:
            chosen.append(replace(readings[0], others=()))
        else:
            faults.append(step.path)
    if faults:
        raise CheckpointError(
            f"{len(faults)} layers that ranks share were saved in an interpretation that is not this version's, not "
            f"this model's, or not one alone for so many ranks: {', '.join(faults)}; {_INSTEAD}"
        )
    return tuple(chosen)


def _taken_formats(step: Step, saved: dict[str, SavedStep]) -> dict[str, str] | None:
    """Pop the formats that a step was saved in from `saved`, keyed by target; None if it was not saved."""
    if not step.keeps_forward:
        entry = saved.get(step.path)
        targets = {fill.target for fill, _ in step.made}
        if entry is None or not entry.formats.keys() <= targets or entry.kind != kind_of(step):
            return None
        of_experts = {fill.target for fill, matrix in step.made if matrix.op == "experts"}
        if len(of_experts & entry.formats.keys()) not in (0, len(of_experts)):  # in all of them or in none
            return None
        return saved.pop(step.path).formats
    formats: dict[str, str] = {}
    for fill, matrix in step.made:
        path = f"{step.path}.{matrix.target}"
        entry = saved.get(path)
        if entry and "weight" in entry.formats and entry.kind == kind_of_linear(step, fill):
            formats[fill.target] = saved.pop(path).formats["weight"]
    return formats


def _ordered(step: Step, saved: Mapping[str, SavedStep]) -> frozenset[str]:
    """Targets of a step that were saved in act-order."""
    if not step.keeps_forward:
        return frozenset(saved[step.path].ordered) if step.path in saved else frozenset()
    entries = {fill.target: saved.get(f"{step.path}.{matrix.target}") for fill, matrix in step.made}
    return frozenset(target for target, entry in entries.items() if entry is not None and entry.ordered)


def _with_formats(
    step: Step, formats: Mapping[str, str], ordered: frozenset[str], device: Device, dtype: torch.dtype
) -> Step:
    """Return the step with its matrices in `formats`, those `ordered` in act-order.

    Activations are rounded as the current config asks.
    """
    fills = []
    for fill in step.fills:
        format = _format_of_part(fill, formats[fill.target]) if fill.target in formats else None
        if format and fill.format:
            asked = quant_format(fill.format).activation_bits
            format = str(replace(quant_format(format), activation_bits=asked))
        fills.append(replace(fill, format=format, ordered=fill.target in ordered))
    chosen = dict(step.bodies)  # lacks bodies of formats that did not fit, now or when saved
    for name in matrix_ops(fills, step.shape) if step.shape else ():
        chosen.setdefault(name, ops.registered()[name].choose(device, dtype).body)
    return replace(step, fills=tuple(fills), bodies=tuple(chosen.items()), why="as it was saved")


def _format_of_part(fill: Fill, format: str) -> str:
    """Return the format of a part of a matrix: groups given by count keep their size from the whole matrix."""
    if fill.cut is None or fill.cut.axis == 0:
        return format
    return str(quant_format(format).of_part(fill.cut.whole_length))


def _cut_faults(plan: Plan, index: SavedIndex) -> list[str]:
    """List the reasons why this rank's parts cannot be joined from the saved ones."""
    needed, is_own, faults = cuts(plan), is_cut_alike(plan, index), []
    for step in plan.steps:
        for fill in step.fills:
            name = f"{step.path}.{fill.target}"
            cut, bands = needed.get(name), index.bands.get(name, ())
            if cut is not None and not is_own and not are_along(bands, cut):
                faults.append(f"{name}: saved by {_sharing(bands)}, needed by {_axes(cut.axis, cut.rows)}")
            elif fill.ordered and cut is not None and cut.axis == 1:
                faults.append(f"{name}: saved in act-order, so its inputs cannot be shared")
            elif fill.format is not None:
                faults += _group_faults(name, quant_format(fill.format), bands, cut, is_own)
    return faults


def _sharing(bands: Sequence[Band]) -> str:
    return _axes(bands[0].tiling.axis, bands[0].rows)


def _axes(axis: int, rows: Range | None) -> str:
    """Describe the axes along which ranks share a matrix."""
    if axis == 0:
        return "its outputs"
    return "its inputs" if rows is None else "its inputs and by experts"


def _group_faults(
    name: str, format: QuantFormat, bands: Sequence[Band], cut: Cut | None, is_own: bool
) -> Iterator[str]:
    """Yield why a part of the inputs would split a group of inputs, or merge per-row scales."""
    axis = cut.axis if cut is not None else bands[0].tiling.axis if bands else 0
    if axis == 0:
        return
    if cut is not None and is_own:
        parts = [[Span(0, 0, cut.length)]]
    elif cut is not None and not bands:
        parts = [[Span(0, *inputs) for inputs in cut.ranges]]
    else:
        needed = [(0, bands[0].tiling.length)] if cut is None else cut.ranges
        parts = [taken(band.tiling.spans(), needed) for band in bands]
    length = cut.whole_length if cut is not None else bands[0].tiling.length
    if why := format.fits(length):
        yield f"{name}: {why}"
        return
    buffers, most = format.buffers(length), max(len({span.source for span in spans}) for spans in parts)
    shared = [buffer.inputs for buffer in buffers if buffer.inputs is not None]
    unit, ends = math.lcm(*shared), {end for spans in parts for span in spans for end in (span.start, span.stop)}
    if most > 1 and len(shared) < len(buffers):
        what = f"inputs of {most} ranks, each with a scale for its rows, would be merged"
        yield f"{name}: {format}: {what}; formats with groups can be"
    elif cut_at := sorted(end for end in ends if end % unit):
        what = f"groups of {unit} inputs" if len(shared) > 1 else f"bytes of {unit} inputs"
        yield f"{name}: {format}: {what} would be cut at {cut_at}; possible: a multiple of {unit}"
    elif cut is not None and (why := format.fits(cut.length)):
        yield f"{name}: {why}"
