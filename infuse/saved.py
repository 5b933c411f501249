"""Saved: our own shards, written from a replaced model and read back into one on meta without quantizer and without proof.

The index says which steps were carried out, and in which formats; the same steps are taken again, filled with what they
held. Their structure was proven when the shards were saved: an index of other specs or layouts is refused. Each rank of a
group writes what it has; another number of ranks reads each part from the runs of whoever has it.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from infuse import ops
from infuse.config import InferenceConfig
from infuse.device import Device
from infuse.errors import CheckpointError, ConfigError, NotAvailable
from infuse.layers.linear import QuantizedLinear
from infuse.parallel.collectives import LOCAL, Group
from infuse.parallel.shard import Cut
from infuse.plan import BLOCK, EMBEDDING, SPLIT, Left, Plan, Step, linear_ops
from infuse.quant.format import quant_format
from infuse.spec.packing import Fill
from infuse.weights.names import held
from infuse.weights.shards import SavedShards, Shared, alone, shared_tensors
from infuse.weights.sources import SAVED, Files, read_json
from infuse.weights.writer import FORMAT, Bundle, write_shards


def save(model: nn.Module, plan: Plan, config: InferenceConfig, folder: str, group: Group = LOCAL, progress: Any = None) -> None:
    """Write `model`, to which `plan` was done, to `folder`: its tensors as they are, and the index; each rank of `group` its own.

    CheckpointError on all ranks where one fails; then there is no index. `check_plan` has said before what is not saved.
    """
    steps = [{"path": step.path, "kind": _digest(step), "formats": step.formats} for step in plan.steps if is_packed(step)]
    quant = config.quant.model_dump(mode="json", exclude_unset=True)
    if config.dtype == torch.int8:  # which asks for the format without a word in `quant`
        quant["format"] = config.weight_format
    dtype = str(plan.dtype).removeprefix("torch.")
    index = {"model": plan.model, "dtype": dtype, "format_of_weights": config.weight_format, "quant": quant, "steps": steps}
    write_shards(Path(folder), list(_bundles(model, plan)), cuts(plan), index, group=group, progress=progress)


def cuts(plan: Plan) -> dict[str, Cut]:
    """How this rank's tensors are cut, by the names that they are stored under."""
    found: dict[str, Cut] = {}
    for step in plan.steps:
        for fill in step.fills if step.shape is not None else ():
            if fill.cut is not None:
                turned = fill.transposed and not is_packed(step)
                found[f"{step.path}.{fill.target}"] = replace(fill.cut, axis=1 - fill.cut.axis) if turned else fill.cut
    return found


def _bundles(model: nn.Module, plan: Plan) -> Iterator[Bundle]:
    """All that `model` holds, quantized matrices as their format defines them, tied tensors once: outside of layers if anywhere."""
    inside = tuple(f"{step.path}." for step in plan.steps if is_packed(step))
    plain = [step for step in plan.steps if step.shape and not is_packed(step)]
    turned = {f"{step.path}.{fill.target}" for step in plain for fill in step.fills if fill.transposed}
    seen: set[int] = set()
    for path, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            seen.update(id(buffer) for buffer in module.buffers(recurse=False))
            parts = ("scale", "data", "zero") if module.zero is not None else ("scale", "data")
            yield Bundle(tuple(f"{path}.{part}" for part in parts), partial(_held, module, parts))
    for name, tensor in sorted(held(model).items(), key=lambda item: item[0].startswith(inside)):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield Bundle((name,), partial(_alone, tensor, name in turned))  # a plain linear is stored as its model had it


def _held(module: QuantizedLinear, parts: tuple[str, ...]) -> tuple[Tensor, ...]:
    weight = module.held()
    return tuple(getattr(weight, part) for part in parts)


def _alone(tensor: Tensor, turned: bool) -> tuple[Tensor, ...]:
    return (tensor.t() if turned else tensor,)


def check_folder(folder: str) -> None:
    """Make `folder`; CheckpointError where shards cannot be written there."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: the shards cannot be written: {error.strerror or error}") from error
    if not os.access(folder, os.W_OK):
        raise CheckpointError(f"{folder}: the shards cannot be written: no permission")


def check_plan(plan: Plan, config: InferenceConfig) -> None:
    """NotAvailable, before anything is done, where `config` asks for shards of quantized layers that are split in place."""
    mixed = [step.path for step in plan.steps if step.depth == SPLIT and step.formats]
    if mixed and config.checkpoint_files[2]:
        raise NotAvailable(f"save_mp_checkpoint_path: {len(mixed)} layers without a spec are split and quantized, which this version "
                           f"cannot save: {mixed[0]}, ...; save them without quant, or by one rank")


def read_index(folder: Path) -> dict[str, Any] | None:
    """The index of our shards in `folder`, None where there is none; CheckpointError where it is not one that can be read."""
    if not (folder / SAVED).is_file():
        return None
    index = read_json(folder / SAVED)
    keys = ("tp_size", "files", "dtype", "format_of_weights", "quant", "steps")
    if not isinstance(index, dict) or index.get("format") != FORMAT or any(key not in index for key in keys):
        raise CheckpointError(f"{folder / SAVED}: not an index of this version ({FORMAT}); shard the model again")
    try:
        index["cuts"] = shared_tensors(index.get("cuts", ()))
        wrong = len(index["files"]) != index["tp_size"] or any(len(one.ranks) != index["tp_size"] for one in index["cuts"].values())
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / SAVED}: corrupt: {type(error).__name__}: {error}") from error
    if wrong:
        raise CheckpointError(f"{folder / SAVED}: saved by {index['tp_size']} ranks, and it names {len(index['files'])} files, or parts of "
                              "another number of ranks")
    return index


def open_shards(folder: Path, index: dict[str, Any], plan: Plan) -> SavedShards:
    """The files that the index names: of as many ranks as now, and cut as now, this rank's alone.

    Layers that are split in place are proven again, on the whole of them, so for these all files are needed.
    """
    own = cuts(plan)
    shared: dict[str, Shared] = index["cuts"]
    alike = index["tp_size"] == plan.mesh.tp and own.keys() == shared.keys() and all(step.depth != SPLIT for step in plan.steps)
    alike = alike and all(shared[name].ranks[plan.mesh.tp_rank] == cut.ranges for name, cut in own.items())
    rank = plan.mesh.tp_rank if alike else None
    files = Files(f"the shards of {folder / SAVED}", (tuple(folder / name for name in index["files"]),))
    wanted = [path for number, path in enumerate(files) if rank in (None, number)]
    if missing := [str(path) for path in wanted if not path.is_file()]:
        raise CheckpointError(f"{files.form}: {len(missing)} files are missing: {', '.join(missing)}")
    return SavedShards(files, shared, rank)


def saved_config(config: InferenceConfig, index: dict[str, Any]) -> InferenceConfig:
    """`config` with the dtype and the format of the shards where it asks for none; ConfigError where it asks for another format."""
    asked = config.weight_format
    stored = index["format_of_weights"]
    quant = type(config.quant)(**index["quant"])
    by_name = config.module_formats and config.module_formats != quant.by_name
    if (asked is not None and asked != stored) or by_name or (config.quant.enabled is False and index["quant"]):
        found = repr(asked) if asked else "formats by name" if by_name else "enabled=False"
        what = stored or quant.by_name or index["dtype"]
        raise ConfigError(f"quant: found {found}, and the shards hold {what}; leave it out, or shard again")
    update = {"quant": quant}
    if config.dtype is None or config.dtype == torch.int8:
        update["dtype"] = getattr(torch, index["dtype"])
    return config.model_copy(update=update)


def saved_plan(plan: Plan, ranks: Sequence[Plan], index: dict[str, Any], device: Device) -> Plan:
    """`plan` with the steps that were saved, in their formats, and with those that leave their weights as they are.

    `ranks` are all ranks' plans; rank 0's has all that a layer is filled with. CheckpointError: a step that differs, a format whose
    groups a rank's part would cut. A matrix has one format on all ranks.
    """
    saved = {entry["path"]: entry for entry in index["steps"]}
    whole = {step.path: step for step in ranks[0].steps}
    fills: dict[tuple[str, str], list[Fill]] = {}
    for one in (one for rank in ranks for one in rank.steps):
        for fill in one.fills:
            fills.setdefault((one.path, fill.target), []).append(fill)
    steps, left = [], list(plan.left)
    faults: list[str] = []
    for step in plan.steps:
        entry = saved.get(step.path)
        if entry is not None:
            formats = entry["formats"]
            if step.path in whole and entry["kind"] == _digest(_with_formats(whole[step.path], formats)):
                del saved[step.path]
                wanted = [(target, text, fills[step.path, target]) for target, text in formats.items()]
                found = {target: _format_of_part(step, theirs, text, index["cuts"], faults) for target, text, theirs in wanted}
                steps.append(replace(_with_bodies(_with_formats(step, found), device, plan.dtype), why="as it was saved"))
        elif not is_packed(step):
            steps.append(step)
        else:
            left.append(Left(step.path, "as it was saved: not replaced then"))
    if saved:
        raise CheckpointError(f"{len(saved)} layers were saved in a form that is not this version's, or not this model's: "
                              f"{', '.join(saved)}; shard the model again")
    if faults:
        raise CheckpointError(f"the shards of {index['tp_size']} ranks cannot be read by {plan.mesh}:\n  " + "\n  ".join(faults))
    return replace(plan, steps=tuple(steps), left=tuple(left), dtype_why="as it was saved")


def _with_formats(step: Step, formats: Mapping[str, str]) -> Step:
    return replace(step, fills=tuple(replace(fill, format=formats.get(fill.target)) for fill in step.fills))


def _with_bodies(step: Step, device: Device, dtype: torch.dtype) -> Step:
    """The step with a body for each op that its formats need: where a group did not fit then, or does not now, it was planned without."""
    chosen = dict(step.bodies)
    for name in linear_ops(step.fills) if step.depth != EMBEDDING else ():
        chosen.setdefault(name, ops.registered()[name].choose(device, dtype).body)
    return replace(step, bodies=tuple(chosen.items()))


def _format_of_part(step: Step, fills: Sequence[Fill], text: str, shared: Mapping[str, Shared], faults: list[str]) -> str:
    """The format that a saved matrix has in all ranks' `fills`; why there is none is added to `faults`."""
    name, format, cut = f"{step.path}.{fills[0].target}", quant_format(text), fills[0].cut
    saved = shared.get(name)
    if (saved or cut) is None or (saved.axis if saved else cut.axis if cut else 0) == 0:
        return text
    size = saved.size if saved else sum(cut.sizes) if cut else 0
    saved = saved or alone(1, size)
    format, layout = format.of_part(size), saved.layout()
    parts = [[run for start, stop in (fill.cut.ranges if fill.cut else [(0, size)]) for run in layout.part(start, stop)] for fill in fills]
    runs = [run for part in parts for run in part]
    group = format.group_size
    if group is None and any(len(part) > 1 for part in parts):  # a scale for each row of each piece: groups that no end of a run cuts
        group = math.gcd(*(run.stop - run.start for run in runs))
        if group % format.pack:
            lengths = ", ".join(f"{run.stop - run.start} of {saved.length(run.rank)}" for run in runs)
            faults.append(f"{name}: {format}: inputs of several ranks, each with a scale for its rows: {lengths}; groups of {group}, which "
                          f"fit them all, would cut bytes of {format.pack} inputs")
            return text
        return str(replace(format, group_size=group))
    limits = sorted({limit for run in runs for limit in (run.start, run.stop)})
    if cut_at := [limit for limit in limits if limit % (group or format.pack)]:
        what = f"groups of {group} inputs" if group else f"bytes of {format.pack} inputs"
        faults.append(f"{name}: {format}: {what} would be cut at {cut_at}; possible: a multiple of {group or format.pack}")
    return str(format)


def is_packed(step: Step) -> bool:
    """Whether the new module's tensors are not the old one's: these are what is read back for the step."""
    return step.shape is not None and (step.depth == BLOCK or bool(step.formats))


def _digest(step: Step) -> str:
    """What the stored tensors of all ranks together mean: the whole shape and the fills, without the kernels that work on them."""
    fills = tuple(replace(fill, cut=None) for fill in step.fills)
    return hashlib.sha256(repr((step.depth, step.whole or step.shape, fills)).encode()).hexdigest()[:16]
