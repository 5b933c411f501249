"""What the index of our shards says of a model's layers, as a plan: the steps that were carried out then, in the
formats of then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from infuse import ops
from infuse.architectures.packing import Fill
from infuse.architectures.split import SplitShape
from infuse.config.inference import InferenceConfig
from infuse.device import Device
from infuse.errors import CheckpointError
from infuse.plan.decide import fallback
from infuse.plan.formats import matrices_made, matrix_ops
from infuse.plan.plan import Plan
from infuse.plan.step import BLOCK, SPLIT, Left, Step
from infuse.quant.parse import quant_format
from infuse.shards.index import SavedIndex, SavedStep
from infuse.shards.save import digest, digest_alone, is_packed, with_formats
from infuse.weights.saved_shards import Shared, alone


def as_saved(plan: Plan, model: nn.Module, index: SavedIndex, *, config: InferenceConfig, device: Device) -> Plan:
    """`plan` at the depth at which each layer was saved, and with those readings of layers that ranks share by which
    they were.

    CheckpointError: a layer was saved in a reading that it does not have here.
    """
    paths, told = index.steps.keys(), index.readings

    def is_deeper(step: Step) -> bool:
        """Whether it was saved in parts: its proof was refused then, or a policy took its place."""
        if step.depth == BLOCK:
            return step.path not in paths and (
                step.path in told or any(path.startswith(f"{step.path}.") for path in paths)
            )
        return step.depth == SPLIT and index.tp_size > 1 and step.path not in told

    steps, left = plan.steps, list(plan.left)
    while deeper := [step for step in steps if is_deeper(step)]:
        inside = _by_step(deeper, fallback(deeper, model, config, device=device, mesh=plan.mesh))
        steps = tuple(one for step in steps for one in inside.get(step.path, [step]))
        why = {BLOCK: "as it was saved: not as a block", SPLIT: "as it was saved: whole on each rank"}
        left += [Left(step.path, why[step.depth]) for step in deeper]
    beside = {step.path: _beside(step, paths) for step in steps if step.depth == SPLIT}
    if any(beside.values()):
        alone = fallback(
            [step for step in steps if beside.get(step.path)], model, config, device=device, mesh=plan.mesh
        )
        extra = {one.path: one for one in alone}
        steps = tuple(
            one
            for step in steps
            for one in (step, *(extra[path] for path in beside.get(step.path, ()) if path in extra))
        )
    return replace(plan, steps=tuple(_as_read(steps, told)), left=tuple(left))


def _by_step(steps: Iterable[Step], inner: Iterable[Step]) -> dict[str, list[Step]]:
    """Path of each of the steps → those of `inner` that are in it."""
    found = list(inner)
    return {step.path: [one for one in found if f"{one.path}.".startswith(f"{step.path}.")] for step in steps}


def _beside(step: Step, paths: Iterable[str]) -> list[str]:
    """What was saved of a layer beside the linears that its ranks share: whole on each of them."""
    assert isinstance(step.shape, SplitShape)
    own = {f"{step.path}.{part.path}" for part in step.shape.linears}
    return sorted(path for path in paths if path.startswith(f"{step.path}.") and path not in own)


def _as_read(steps: Iterable[Step], told: Mapping[str, Sequence[str]]) -> list[Step]:
    """The steps, layers that ranks share in the readings that are `told` of them; one reading needs no proof."""
    chosen, unknown = [], []
    for step in steps:
        names = told.get(step.path)
        if step.depth != SPLIT or names is None:
            chosen.append(step)
            continue
        found = [
            one
            for one in (step, *step.others)
            if isinstance(one.whole, SplitShape) and set(names) & set(one.whole.readings)
        ]
        if found:
            chosen.append(replace(found[0], others=tuple(found[1:]), proven=len(found) == 1))
        else:
            unknown.append(step.path)
    if unknown:
        raise CheckpointError(
            f"{len(unknown)} layers that ranks share were saved in a reading that is not this version's, or not this "
            f"model's: {', '.join(unknown)}; shard the model again"
        )
    return chosen


def saved_plan(plan: Plan, ranks: Sequence[Plan], index: SavedIndex, device: Device) -> Plan:
    """`plan` with the steps that were saved, in their formats, and with those that leave their weights as they are.

    `ranks` are all ranks' plans; rank 0's has all that a layer is filled with. CheckpointError: a step that differs, a
    format whose groups a rank's part would cut. A matrix has one format on all ranks.
    """
    saved = dict(index.steps)
    whole = {step.path: step for step in ranks[0].steps}
    fills: dict[tuple[str, int, str], list[Fill]] = {}
    for step in (step for rank in ranks for step in rank.steps):
        for number, one in enumerate((step, *step.others)):
            for fill in one.fills:
                fills.setdefault((one.path, number, fill.target), []).append(fill)
    steps, left = [], list(plan.left)
    faults: list[str] = []
    for step in plan.steps:
        formats = _taken(whole[step.path], saved) if step.path in whole else None
        if formats is None and not is_packed(step):
            steps.append(step)
        elif formats is None:
            left.append(Left(step.path, "as it was saved: not replaced then"))
        else:
            readings: list[Step] = []
            wrong: list[str] = []
            for number, one in enumerate((step, *step.others)):
                theirs = [(target, text, fills[one.path, number, target]) for target, text in formats.items()]
                cutting: list[str] = []
                found = {target: _format_of_part(one, part, text, index.cuts, cutting) for target, text, part in theirs}
                found = {target: _as_planned(text, one.formats.get(target)) for target, text in found.items()}
                if not cutting:
                    readings.append(_with_bodies(with_formats(one, found), device, plan.dtype))
                wrong = wrong or cutting
            if readings:
                why = "as it was saved" if step.depth != SPLIT or step.proven else step.why
                steps.append(replace(readings[0], others=tuple(readings[1:]), why=why))
            else:
                faults += wrong
    if saved:
        raise CheckpointError(
            f"{len(saved)} layers were saved in a form that is not this version's, or not this model's: "
            f"{', '.join(saved)}; shard the model again"
        )
    if faults:
        raise CheckpointError(
            f"the shards of {index.tp_size} ranks cannot be read by {plan.mesh}:\n  " + "\n  ".join(faults)
        )
    return replace(plan, steps=tuple(steps), left=tuple(left), dtype_why="as it was saved")


def _taken(step: Step, saved: dict[str, SavedStep]) -> dict[str, str] | None:
    """The formats in which a step was saved, taken out of `saved`, by path; None where it was not."""
    if step.depth != SPLIT:
        entry = saved.get(step.path)
        targets = {fill.target for fill in step.fills}
        if (
            entry is None
            or not entry.formats.keys() <= targets
            or entry.kind != digest(with_formats(step, entry.formats))
        ):
            return None
        return saved.pop(step.path).formats
    formats: dict[str, str] = {}
    for fill, _ in matrices_made(step.fills, step.shape) if step.shape else ():
        path = f"{step.path}.{fill.target}".removesuffix(".weight")
        entry = saved.get(path)
        format = entry.formats.get("weight") if entry else None
        if entry and format and entry.kind == digest_alone(step, replace(fill, format=format)):
            del saved[path]
            formats[fill.target] = format
    return formats


def _as_planned(saved: str, planned: str | None) -> str:
    """The saved format, and activations as they were asked for this time."""
    return (
        str(replace(quant_format(saved), activation_bits=quant_format(planned).activation_bits)) if planned else saved
    )


def _with_bodies(step: Step, device: Device, dtype: torch.dtype) -> Step:
    """The step with a body for each op that its formats need: where a group did not fit then, or does not now, it was
    planned without.
    """
    chosen = dict(step.bodies)
    for name in matrix_ops(step.fills, step.shape) if step.shape else ():
        chosen.setdefault(name, ops.registered()[name].choose(device, dtype).body)
    return replace(step, bodies=ops.layer_bodies(chosen.items()))


def _format_of_part(
    step: Step, fills: Sequence[Fill], text: str, shared: Mapping[str, Shared], faults: list[str]
) -> str:
    """The format that a saved matrix has in all ranks' `fills`; why there is none is added to `faults`."""
    name, format, cut = f"{step.path}.{fills[0].target}", quant_format(text), fills[0].cut
    saved = shared.get(name)
    if (saved or cut) is None or (saved.axis if saved else cut.axis if cut else 0) == 0:
        return text
    size = saved.size if saved else sum(cut.sizes) if cut else 0
    saved = saved or alone(1, size)
    format, layout = format.of_part(size), saved.layout()
    parts = [
        [run for start, stop in (fill.cut.ranges if fill.cut else [(0, size)]) for run in layout.part(start, stop)]
        for fill in fills
    ]
    runs = [run for part in parts for run in part]
    group = format.group_size
    if group is None and any(
        len(part) > 1 for part in parts
    ):  # a scale for each row of each piece: groups that no end of a run cuts
        group = math.gcd(*(run.stop - run.start for run in runs))
        if group % format.pack:
            lengths = ", ".join(f"{run.stop - run.start} of {saved.length(run.rank)}" for run in runs)
            faults.append(
                f"{name}: {format}: inputs of several ranks, each with a scale for its rows: {lengths}; groups of {group}, which "
                f"fit them all, would cut bytes of {format.pack} inputs"
            )
            return text
        return str(replace(format, group_size=group))
    limits = sorted({limit for run in runs for limit in (run.start, run.stop)})
    if cut_at := [limit for limit in limits if limit % (group or format.pack)]:
        what = f"groups of {group} inputs" if group else f"bytes of {format.pack} inputs"
        faults.append(
            f"{name}: {format}: {what} would be cut at {cut_at}; possible: a multiple of {group or format.pack}"
        )
    return str(format)
