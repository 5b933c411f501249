"""Load a checkpoint into a live or meta model; everything checkable without reading values is checked first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infuse.apply.apply import Progress, carry_out
from infuse.apply.kinds import work_of
from infuse.config.inference import InferenceConfig
from infuse.ground.device import Device
from infuse.ground.errors import CheckpointError, ConfigError
from infuse.layers.mixture.experts import mapped_bytes
from infuse.parallel.group import LOCAL, Group
from infuse.parallel.mesh import ONE, Mesh
from infuse.plan.bytes import parameter_bytes
from infuse.plan.codes import lost_codes
from infuse.plan.decide import make_plan
from infuse.plan.packed import packed_fill, packed_paths, packings
from infuse.plan.plan import Plan
from infuse.plan.stored import StoredFormats
from infuse.shards.index import read_index
from infuse.shards.plan import saved_plan
from infuse.shards.save import open_shards, saved_config
from infuse.weights.alike import agree_on_weights, index_sum, sampled_sums
from infuse.weights.checkpoint import Checkpoint
from infuse.weights.fill import saved_tensors
from infuse.weights.in_model import CodesInModel, codes_in
from infuse.weights.lazy import tensor_at
from infuse.weights.loader import CheckpointLoader
from infuse.weights.model_tensors import ModelTensors, model_tensors
from infuse.weights.names import held
from infuse.weights.pieces import Packed
from infuse.weights.saved_shards import SavedShards
from infuse.weights.sources import SAVED, find_files


@dataclass(frozen=True)
class Loaded:
    """The plan as decided and as executed, and the effective config, which takes dtype and format from shards."""

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
    """Make a plan and execute it with `config`'s checkpoint: on one rank of `mesh`, in step with its `group`.

    On CheckpointError, ConfigError or ProofError, `model` still has all its tensors and modules, on all ranks. Loading
    a model on meta takes the memory of the result plus one layer. A live model's old values are kept until all new ones
    are loaded.
    """
    with group.on_all_or_none("loading"):
        source, base_dir, _ = config.checkpoint_files
        folder = _folder(source, base_dir)
        index = None if folder is None else read_index(folder)
        shards: SavedShards | None = None
        if folder is None or index is None:
            if config.experts == "mmap" and not config.checkpoint_files[2]:
                raise ConfigError(
                    f'experts: found "mmap" with checkpoint={source!r}, which is not a folder of infuse\'s own shards; '
                    'experts are mapped from these: make them by init_inference(model, checkpoint=..., experts="mmap", '
                    "save_mp_checkpoint_path=FOLDER), then give checkpoint=FOLDER"
                )
            tensors = _found(model, config, device)
            plan = make_plan(model, config, device, mesh, stored=StoredFormats.of(tensors.tensors))
            sums = partial(sampled_sums, tensors)
        else:
            config = saved_config(config, index)
            _tie(model)
            plan = make_plan(model, config, device, mesh, stored=StoredFormats(index.stored, orders=index.orders))
            plan = saved_plan(plan, model, index, device=device)
            shards = open_shards(folder, index, plan, config.experts == "mmap")
            _check_saved(model, shards, plan)
            tensors = model_tensors(model, shards, _unread(plan))
            sums = partial(index_sum, folder / SAVED)
        _agree(group, model, plan, sums)
        done = _carried_out(model, plan, tensors, config, device, group, progress)
        lost = () if shards is not None else tuple(lost_codes(done.stored, done.steps, done.dtype))
        mapped, notes = mapped_bytes(model), (*done.notes, *tensors.notes, *lost, *_mapping_notes(shards, model))
        return Loaded(plan, replace(done, notes=notes, mapped_bytes=mapped), config)


def take_codes(
    model: nn.Module,
    codes: CodesInModel,
    config: InferenceConfig,
    device: Device,
    mesh: Mesh = ONE,
    group: Group = LOCAL,
    progress: Progress | None = None,
) -> Loaded:
    """Make a plan and execute it with the `codes` that another library holds in a live `model`.

    As `load`, with the same errors, which restore the model. The old codes are kept until all new ones are in place.
    """
    with group.on_all_or_none("init_inference"), ExitStack() as undo:
        plan, tensors = _plan_of_codes(model, codes, config, device, mesh, undo)
        _agree(group, model, plan, partial(sampled_sums, tensors))
        done = _carried_out(model, plan, tensors, config, device, group, progress)
        undo.pop_all()
        notes = (*done.notes, *tensors.notes, *lost_codes(done.stored, done.steps, done.dtype))
        return Loaded(plan, replace(done, notes=notes), config)


def not_taken(why: str) -> str:
    """A note on codes in a live model that cannot be read."""
    return f"the codes of its linears are not taken: {why}"


def _plan_of_codes(
    model: nn.Module, codes: CodesInModel, config: InferenceConfig, device: Device, mesh: Mesh, undo: ExitStack
) -> tuple[Plan, ModelTensors]:
    """Put plain linears in the places of the modules that hold the codes, and plan for these."""
    before_bytes = parameter_bytes(model) + codes.beside_bytes
    tensors = codes.in_plain_linears(model, undo)
    plan = make_plan(model, config, device, mesh, stored=StoredFormats.of(tensors.tensors))
    return replace(plan, before_bytes=before_bytes), tensors


def _agree(group: Group, model: nn.Module, plan: Plan, sums: Callable[[], Mapping[str, int]]) -> None:
    """Check that all ranks have the same plan and, by their `sums`, the same values."""
    if group.size > 1:
        group.check_same({"the plan": plan.digest()}, "the plan")  # the plan determines what each rank reads
        agree_on_weights(group, model, sums())


def _carried_out(
    model: nn.Module,
    plan: Plan,
    tensors: ModelTensors,
    config: InferenceConfig,
    device: Device,
    group: Group,
    progress: Progress | None,
) -> Plan:
    """Execute the plan with these tensors."""
    layers = (step.path for step in plan.steps if step.shape is not None)
    with CheckpointLoader(model, tensors, layers, plan.dtype, device.torch_device) as loader:
        model.eval()
        done = carry_out(plan, loader, config, progress, group)
        group.barrier("the end of loading")  # if a rank fails here, all restore their models
    return done


def planned(
    model: nn.Module, config: InferenceConfig, device: Device, mesh: Mesh = ONE, *, in_pipeline: bool = False
) -> Plan:
    """The plan as `load` would decide it, or that for the live model if the config names no checkpoint.

    Of a checkpoint only the headers are read. Shards of ours have their own plan, which is not looked at.
    """
    source, base_dir, _ = config.checkpoint_files
    folder = _folder(source, base_dir)
    codes = None if source is not None or in_pipeline else codes_in(model)
    if isinstance(codes, CodesInModel):
        with ExitStack() as undo:
            plan, tensors = _plan_of_codes(model, codes, config, device, mesh, undo)
            plan.close()  # further candidates would be decided for linears that are gone
        return replace(plan, notes=(*plan.notes, *tensors.notes, *lost_codes(plan.stored, plan.steps, plan.dtype)))
    if source is None or in_pipeline or (folder is not None and (folder / SAVED).is_file()):
        plan = make_plan(model, config, device, mesh, in_pipeline=in_pipeline)
        return plan if codes is None else replace(plan, notes=(*plan.notes, not_taken(codes)))
    tensors = _found(model, config, device)
    stored = StoredFormats.of(tensors.tensors)
    plan = make_plan(model, config, device, mesh, in_pipeline=in_pipeline, stored=stored)
    return replace(plan, notes=(*plan.notes, *tensors.notes, *lost_codes(stored, plan.steps, plan.dtype)))


def _found(model: nn.Module, config: InferenceConfig, device: Device) -> ModelTensors:
    """Find the model's tensors in the config's checkpoint; no values are read but those of small tables."""
    source, base_dir, _ = config.checkpoint_files
    checkpoint = Checkpoint(find_files(source, base_dir), _quantization(model))
    _tie(model)
    return model_tensors(model, checkpoint, packings=partial(_packings, model, config, device))


def _mapping_notes(shards: SavedShards | None, model: nn.Module) -> Iterator[str]:
    """Yield notes for experts="mmap": which experts are in memory anyway, and why."""
    if shards is None or not shards.maps:
        return
    by_reason: dict[str, list[str]] = {}
    for path, why in shards.unmapped.items():
        by_reason.setdefault(why, []).append(path)
    for why, paths in by_reason.items():
        yield (
            f"{len(paths)} matrices of experts were read into memory, not mapped, e.g. {paths[0]}: {why}; to map them, "
            'save the shards again, on this kind of processor and in this dtype, with experts="mmap" beside '
            "save_mp_checkpoint_path"
        )
    if not by_reason and not mapped_bytes(model):
        yield "experts: no effect here: these shards have no experts that infuse replaced"


def load_values(model: nn.Module, config: InferenceConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Load the values of `config`'s checkpoint into an unreplaced `model`, which a CheckpointError leaves unchanged."""
    source, base_dir, _ = config.checkpoint_files
    folder = _folder(source, base_dir)
    if folder is not None and (folder / SAVED).is_file():
        raise CheckpointError(
            f"{folder}: holds layers that were replaced; read it with init_inference(model, checkpoint=...)"
        )
    tensors = _found(model, config, Device.of(device))
    with torch.no_grad(), CheckpointLoader(model, tensors, (), dtype, device) as loader:
        loader.place_rest()


def _quantization(model: nn.Module) -> Any:
    """What the model's config says of its checkpoint's quantization."""
    return getattr(getattr(model, "config", None), "quantization_config", None)


def _packings(model: nn.Module, config: InferenceConfig, device: Device) -> dict[str, Packed]:
    """The packed matrices of a model's layers, whether or not they are replaced."""
    whole = config.model_copy(update={"replace_with_kernel_inject": True})
    return packings(make_plan(model, whole, device).steps)


def _tie(model: nn.Module) -> None:
    if any(parameter.is_meta for parameter in model.parameters()) and hasattr(model, "tie_weights"):
        model.tie_weights()  # type: ignore[operator]  # `model.to("meta")` unties weights


def _folder(source: Any, base_dir: str) -> Path | None:
    """Return the folder that may hold our shards: `source` itself, or the folder of the index that it names."""
    if not isinstance(source, str):
        return None
    path = Path(base_dir or ".") / source
    return path.parent if path.name == SAVED else path


def _unread(plan: Plan) -> Callable[[str], bool]:
    """Match names that our shards lack: those of modules saved packed, and biases that another rank adds."""
    away = [f"{path}." for step in plan.steps for path in packed_paths(step)]
    for step in plan.steps:
        if step.keeps_forward and step.shape and step.whole:
            parts = zip(step.whole.matrices, step.shape.matrices, strict=True)
            away += [f"{step.path}.{whole.target}.bias" for whole, part in parts if whole.bias and not part.bias]
    return lambda name: name.startswith(tuple(away))


def _check_saved(model: nn.Module, shards: SavedShards, plan: Plan) -> None:
    """Raise CheckpointError if tensors of the saved layers are missing or misshaped.

    Tensors tied to one outside of these layers are read under the model's own names instead.
    """
    # A step that shares a weight has no tensors of its own.
    packed = [step for step in plan.steps if packed_paths(step) and not step.shares]
    inside = tuple(f"{path}." for step in plan.steps for path in packed_paths(step))
    outside = {id(tensor) for name, tensor in held(model).items() if not name.startswith(inside)}
    wrong: list[str] = []
    for step in packed:
        old = model.get_submodule(step.path)
        packed_fills = [fill for fill in step.fills if packed_fill(step, fill)]
        inner_fills = [fill for fill in packed_fills if id(tensor_at(old, fill.sources[0])) not in outside]
        wanted = saved_tensors(work_of(step).empty(step, plan.dtype), step.path, inner_fills)
        faults = (shards.fault(name, tensor) for name, tensor in wanted.items())
        wrong += [fault for fault in faults if fault]
    if wrong:
        raise CheckpointError(f"{shards.form} are not this model's:\n  " + "\n  ".join(wrong))
