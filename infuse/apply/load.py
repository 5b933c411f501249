"""Load: a checkpoint into a model, live or on meta. Everything that can be judged without values is judged first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infuse.apply.apply import Progress, apply
from infuse.apply.build import build
from infuse.architectures.split import SplitShape
from infuse.config.inference import InferenceConfig
from infuse.device import Device
from infuse.errors import CheckpointError
from infuse.parallel.group import LOCAL, Group
from infuse.parallel.mesh import ONE, Mesh
from infuse.plan.decide import make_plan
from infuse.plan.plan import Plan
from infuse.plan.step import Step
from infuse.shards.index import read_index
from infuse.shards.plan import saved_plan
from infuse.shards.save import is_packed, open_shards, packed_fill, packed_paths, saved_config
from infuse.weights.alike import agree_on_weights, index_sum, sampled_sums
from infuse.weights.checkpoint import Checkpoint, TensorSource
from infuse.weights.fill import saved_tensors
from infuse.weights.names import held, model_reader
from infuse.weights.placing import Placing
from infuse.weights.reader import tensor_at
from infuse.weights.saved_shards import SavedShards
from infuse.weights.sources import SAVED, find_files


@dataclass(frozen=True)
class Loaded:
    """What was planned, what was done, and by which configuration: shards that are read back say themselves what they
    hold.
    """

    decided: Plan
    done: Plan
    config: InferenceConfig


def load(
    model: nn.Module,
    config: InferenceConfig,
    device: Device,
    mesh: Mesh = ONE,
    group: Group = LOCAL,
    progress: Progress | None = None,
) -> Loaded:
    """Plan, and carry the plan out on `config`'s checkpoint: for one rank of `mesh` its part, in step with its `group`.

    CheckpointError, ConfigError or ProofError: `model` has every tensor and module that it had, on all ranks. A model
    on meta takes the memory of the result and of one layer; of a live model the old values stay until all new ones are
    there.
    """
    with group.on_all_or_none("loading"):
        return _load(model, config, device, mesh, group, progress)


def _load(
    model: nn.Module, config: InferenceConfig, device: Device, mesh: Mesh, group: Group, progress: Progress | None
) -> Loaded:
    source, base_dir, _ = config.checkpoint_files
    folder = _folder(source, base_dir)
    index = read_index(folder) if folder is not None else None
    files = find_files(source, base_dir) if index is None else None
    config = config if index is None else saved_config(config, index)
    _tie(model)
    decided = make_plan(model, config, device, mesh)
    packed: list[Step] = []
    checkpoint: TensorSource
    if folder is None or index is None:
        assert files is not None
        checkpoint = Checkpoint(files)
    else:
        decided = saved_plan(decided, model, index, config=config, device=device)
        packed = [step for step in decided.steps if is_packed(step)]
        checkpoint = open_shards(folder, index, decided)
    inside = tuple(f"{path}." for step in packed for path in packed_paths(step))
    _check_saved(
        model,
        checkpoint,
        packed,
        decided.dtype,
        {id(x) for name, x in held(model).items() if not name.startswith(inside)},
    )
    reader = model_reader(model, checkpoint, _unread(decided) if index is not None else lambda name: False)
    if group.size > 1:
        group.check_same({"the plan": decided.digest()}, "the plan")  # what the ranks read depends on it
        agree_on_weights(
            group, model, sampled_sums(reader) if index is None or folder is None else index_sum(folder / SAVED)
        )
    layers = (step.path for step in decided.steps if step.shape is not None)
    with Placing(model, reader, layers, decided.dtype, device.torch_device, saved=index is not None) as placing:
        model.eval()
        done = apply(decided, model, config, progress, placing, group)
        group.barrier("the end of loading")  # or all give back what they have
    return Loaded(decided, replace(done, notes=(*done.notes, *reader.notes)), config)


def load_values(model: nn.Module, config: InferenceConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Give `model`, in which nothing was replaced, the values of `config`'s checkpoint; as it was after a
    CheckpointError.
    """
    source, base_dir, _ = config.checkpoint_files
    folder = _folder(source, base_dir)
    if folder is not None and (folder / SAVED).is_file():
        raise CheckpointError(
            f"{folder}: holds layers that were replaced; read it with init_inference(model, checkpoint=...)"
        )
    _tie(model)
    reader = model_reader(model, Checkpoint(find_files(source, base_dir)))
    with torch.no_grad(), Placing(model, reader, (), dtype, device) as placing:
        placing.place_rest()


def _tie(model: nn.Module) -> None:
    if any(parameter.is_meta for parameter in model.parameters()) and hasattr(model, "tie_weights"):
        model.tie_weights()  # type: ignore[operator]  # `model.to("meta")` unties


def _folder(source: Any, base_dir: str) -> Path | None:
    """The folder that may be one of our shards: named itself, or by its index."""
    if not isinstance(source, str):
        return None
    path = Path(base_dir or ".") / source
    return path.parent if path.name == SAVED else path


def _unread(plan: Plan) -> Callable[[str], bool]:
    """The names that our shards do not have in the words of the model: of modules that were saved packed, and biases
    that another rank adds.
    """
    away = [f"{path}." for step in plan.steps for path in packed_paths(step)]
    for step in plan.steps:
        if isinstance(step.whole, SplitShape) and isinstance(step.shape, SplitShape):
            parts = zip(step.whole.matrices, step.shape.matrices, strict=True)
            away += [f"{step.path}.{whole.target}.bias" for whole, part in parts if whole.bias and not part.bias]
    return lambda name: name.startswith(tuple(away))


def _check_saved(
    model: nn.Module, checkpoint: TensorSource, packed: Iterable[Step], dtype: torch.dtype, outside: set[int]
) -> None:
    """All tensors of the saved layers are there, in their shapes; those that are tied to what is `outside` of layers
    are there.
    """
    wrong: list[str] = []
    if not packed:
        return
    assert isinstance(checkpoint, SavedShards)
    for step in packed:
        if step.shares:  # it has no tensors of its own
            continue
        old = model.get_submodule(step.path)
        own = [
            fill
            for fill in step.fills
            if packed_fill(step, fill) and id(tensor_at(old, fill.sources[0])) not in outside
        ]
        for name, wanted in saved_tensors(build(step, dtype), step.path, own).items():
            if fault := checkpoint.fault(name, wanted.cut, wanted.shape, wanted.dtype):
                wrong.append(fault)
    if wrong:
        raise CheckpointError(f"{checkpoint.form} are not this model's:\n  " + "\n  ".join(wrong))
