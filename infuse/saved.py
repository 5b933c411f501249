"""Saved: our own shards, written from a replaced model and read back into one on meta without quantizer and without proof.

The index says which steps were carried out, and in which formats; the same steps are taken again, filled with what they
held. Their structure was proven when the shards were saved: an index of other specs or layouts is refused.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from infuse.config import InferenceConfig
from infuse.errors import CheckpointError, ConfigError
from infuse.layers.linear import QuantizedLinear
from infuse.plan import BLOCK, Left, Plan, Step
from infuse.weights.names import held
from infuse.weights.sources import SAVED, Files, read_json
from infuse.weights.writer import FORMAT, Bundle, write_shards


def save(model: nn.Module, plan: Plan, config: InferenceConfig, folder: str, progress: Any = None) -> None:
    """Write `model`, to which `plan` was done, to `folder`: its tensors as they are, and the index."""
    steps = [{"path": step.path, "kind": _digest(step), "formats": step.formats} for step in plan.steps if is_packed(step)]
    quant = config.quant.model_dump(mode="json", exclude_unset=True)
    if config.dtype == torch.int8:  # which asks for the format without a word in `quant`
        quant["format"] = config.weight_format
    dtype = str(plan.dtype).removeprefix("torch.")
    index = {"model": plan.model, "dtype": dtype, "format_of_weights": config.weight_format, "quant": quant, "steps": steps}
    write_shards(Path(folder), list(_bundles(model, plan)), index, progress)


def _bundles(model: nn.Module, plan: Plan) -> Iterator[Bundle]:
    """All that `model` holds, quantized matrices as their format defines them, tied tensors once: outside of layers if anywhere."""
    inside = tuple(f"{step.path}." for step in plan.steps if is_packed(step))
    turned = {f"{step.path}.weight" for step in plan.steps if step.shape and not is_packed(step) and step.fills[0].transposed}
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


def read_index(folder: Path) -> dict[str, Any] | None:
    """The index of our shards in `folder`, None where there is none; CheckpointError where it is not one that can be read."""
    if not (folder / SAVED).is_file():
        return None
    index = read_json(folder / SAVED)
    keys = ("tp_size", "files", "dtype", "format_of_weights", "quant", "steps")
    if not isinstance(index, dict) or index.get("format") != FORMAT or any(key not in index for key in keys):
        raise CheckpointError(f"{folder / SAVED}: not an index of this version ({FORMAT}); shard the model again")
    if index["tp_size"] != 1:
        raise CheckpointError(f"{folder / SAVED}: saved by {index['tp_size']} ranks; possible in this version: 1")
    return index


def saved_files(folder: Path, index: dict[str, Any]) -> Files:
    """The files that the index names."""
    files = Files(f"the shards of {folder / SAVED}", tuple((folder / name,) for name in index["files"]))
    if missing := [str(path) for path in files if not path.is_file()]:
        raise CheckpointError(f"{files.form}: {len(missing)} files are missing: {', '.join(missing)}")
    return files


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


def saved_plan(plan: Plan, index: dict[str, Any]) -> Plan:
    """`plan` with the steps that were saved, and with those that leave their weights as they are; CheckpointError where one differs."""
    saved = {entry["path"]: entry for entry in index["steps"]}
    steps, left = [], list(plan.left)
    for step in plan.steps:
        entry = saved.pop(step.path, None)
        if entry is not None and (entry["kind"], entry["formats"]) == (_digest(step), step.formats):
            steps.append(replace(step, why="as it was saved"))
        elif entry is not None:
            saved[step.path] = entry
        elif not is_packed(step):
            steps.append(step)
        else:
            left.append(Left(step.path, "as it was saved: not replaced then"))
    if saved:
        raise CheckpointError(f"{len(saved)} layers were saved in a form that is not this version's, or not this model's: "
                              f"{', '.join(saved)}; shard the model again")
    return replace(plan, steps=tuple(steps), left=tuple(left), dtype_why="as it was saved")


def is_packed(step: Step) -> bool:
    """Whether the new module's tensors are not the old one's: these are what is read back for the step."""
    return step.shape is not None and (step.depth == BLOCK or bool(step.formats))


def _digest(step: Step) -> str:
    """What the stored tensors mean: the shape and the fills, without the kernels that work on them."""
    return hashlib.sha256(repr((step.depth, step.shape, step.fills)).encode()).hexdigest()[:16]
