"""Save a replaced model as our own shards and open them again, without quantizing or proving anything twice.

The index lists the executed steps and their formats. Loading repeats these steps with the saved tensors. Their
structure was proven when the shards were saved; an index with other specs or layouts is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from infuse.architectures.foreign.plain import LinearShape
from infuse.architectures.packing import Fill
from infuse.config.inference import InferenceConfig
from infuse.ground.errors import CheckpointError, ConfigError
from infuse.layers.linear import Quantized, QuantizedLinear
from infuse.layers.mixture.experts import QuantizedExpertMatrix, stored_body
from infuse.parallel.group import LOCAL, Group
from infuse.parallel.slices import Cut
from infuse.plan.digest import digest_of
from infuse.plan.packed import packed_fill, packed_paths
from infuse.plan.plan import Plan
from infuse.plan.step import Step
from infuse.quant.format import QuantFormat
from infuse.quant.parse import quant_format
from infuse.shards.files import Bundle, write_shards, writing
from infuse.shards.index import SavedIndex
from infuse.weights.names import placed
from infuse.weights.saved_shards import SavedShards, ShardFiles
from infuse.weights.sources import SAVED


def save(
    model: nn.Module, plan: Plan, config: InferenceConfig, folder: str, group: Group = LOCAL, progress: Any = None
) -> None:
    """Write `model`, on which `plan` was executed, to `folder`: each rank of `group` its tensors, and the index.

    A failure on one rank raises CheckpointError on all ranks; then there is no index. For a layer without a spec that
    ranks split, the index has its interpretation, and each quantized linear as a step, as for a single rank.
    """
    laid = _laid(model) if config.experts == "mmap" else {}
    steps = {path: entry for step in plan.steps for path, entry in _entries(step, laid).items()}
    interpretations = {step.path: list(step.interpretations) for step in plan.steps if step.keeps_forward}
    quant = config.quant.model_dump(mode="json", exclude_unset=True)
    if config.dtype == torch.int8:  # int8 implies the format without setting `quant`
        quant["format"] = config.weight_format
    index = {
        "model": plan.model,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "format_of_weights": config.weight_format,
        "quant": quant,
        "steps": steps,
        "interpretations": interpretations,
    }
    if plan.stored.formats:
        index["stored"] = dict(plan.stored.formats)
    if plan.stored.orders:
        index["orders"] = dict(plan.stored.orders)
    write_shards(Path(folder), list(_bundles(model, plan, laid)), cuts(plan), index, group=group, progress=progress)


def cuts(plan: Plan) -> dict[str, Cut]:
    """Return the cuts of this rank's tensors by stored name."""
    named: dict[str, Cut] = {}
    for step in plan.steps:
        for fill in step.fills:
            if fill.cut is not None:
                turned = fill.transposed and not packed_fill(step, fill)
                named[f"{step.path}.{fill.target}"] = replace(fill.cut, axis=1 - fill.cut.axis) if turned else fill.cut
    return named


def _laid(model: nn.Module) -> dict[str, QuantizedExpertMatrix]:
    """Return the expert matrices whose kernel layout can be stored, by path."""
    modules = model.named_modules()
    matrices = {path: module for path, module in modules if isinstance(module, QuantizedExpertMatrix)}
    return {path: matrix for path, matrix in matrices.items() if matrix.laid() is not None}


def _bundles(model: nn.Module, plan: Plan, laid: Mapping[str, QuantizedExpertMatrix]) -> Iterator[Bundle]:
    """Yield all tensors of `model`: quantized matrices in their format's layout, and tied tensors once.

    Those in `laid` are in their kernel's layout and come first, so that the large ones are aligned to cache lines.
    A tensor tied between a layer and a place outside of it is stored under its outside name.
    """
    inside = tuple(f"{path}." for step in plan.steps for path in packed_paths(step))
    plain = [(step, fill) for step in plan.steps for fill in step.fills if not packed_fill(step, fill)]
    turned = {f"{step.path}.{fill.target}" for step, fill in plain if fill.transposed}
    seen: set[int] = set()
    for which in (slice(0, 1), slice(1, None)):
        for path, matrix in laid.items():
            seen.update(id(buffer) for buffer in matrix.buffers(recurse=False))
            names = matrix.format.names[which]
            yield Bundle(tuple(f"{path}.{part}" for part in names), partial(_as_laid, matrix, names))
    for path, module in model.named_modules():
        if path not in laid and isinstance(module, (QuantizedLinear, QuantizedExpertMatrix)):
            parts = module.format.names
            seen.update(id(module.get_buffer(part)) for part in parts)
            yield Bundle(tuple(f"{path}.{part}" for part in parts), partial(_held, module, parts))
    for name, tensor in sorted(placed(model).items(), key=lambda item: item[0].startswith(inside)):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            # A plain linear is stored in the orientation of the original model.
            yield Bundle((name,), partial(_alone, tensor, name in turned))


def _as_laid(matrix: QuantizedExpertMatrix, parts: tuple[str, ...]) -> tuple[Tensor, ...]:
    weight = matrix.laid()
    assert weight is not None
    return tuple(weight.tensors[part] for part in parts)


def _held(module: Quantized, parts: tuple[str, ...]) -> tuple[Tensor, ...]:
    weight = module.held()
    return tuple(weight.tensors[part] for part in parts)


def _alone(tensor: Tensor, turned: bool) -> tuple[Tensor, ...]:
    return (tensor.t() if turned else tensor,)


def check_folder(folder: str) -> None:
    """Create `folder`; CheckpointError if shards cannot be written there."""
    with writing(folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("no permission")


def open_shards(folder: Path, index: SavedIndex, plan: Plan, maps: bool = False) -> SavedShards:
    """Open the files that the index names; only this rank's file if the number of ranks and the cuts are unchanged.

    `maps`: memory-map the experts.
    """
    needed, rank, alike = cuts(plan), plan.mesh.rank, is_cut_alike(plan, index)
    form, paths = f"the shards of {folder / SAVED}", [folder / file.name for file in index.files]
    wanted = [paths[rank]] if alike else paths
    if missing := [str(path) for path in wanted if not path.is_file()]:
        raise CheckpointError(f"{form}: {len(missing)} files are missing: {', '.join(missing)}")
    layouts = index.layouts
    if not alike and (cut := sorted(path for path in layouts if _cuts_panels(path, needed, index))):
        raise CheckpointError(
            f"{form}: the experts of {len(cut)} matrices were saved for mapping by {index.tp_size} ranks, in "
            f"{layouts[cut[0]]}, and {plan.mesh} would cut these: {', '.join(cut)}; load them by as many ranks, or "
            'save them again without experts="mmap"'
        )
    files = ShardFiles(paths, [file.checksums for file in index.files], index.bands, index.coded, layouts)
    return SavedShards(form, files, rank if alike else None, maps)


def is_cut_alike(plan: Plan, index: SavedIndex) -> bool:
    """True if this rank's file has exactly the parts that this rank needs."""
    needed, rank = cuts(plan), plan.mesh.rank
    if index.tp_size != plan.mesh.size or index.files[rank].cuts.keys() != needed.keys():
        return False
    return all(_part(index.files[rank].cuts[name]) == _part(cut) for name, cut in needed.items())


def _part(cut: Cut) -> Cut:
    """Return the cut without the sizes of its sources."""
    return replace(cut, sizes=(cut.whole_length,))


def _cuts_panels(path: str, needed: Mapping[str, Cut], index: SavedIndex) -> bool:
    """Whether this rank's part of a matrix, or a saved part, splits a unit of rows of its stored layout."""
    layout, name = stored_body(index.layouts[path]).layout, f"{path}.weight"
    rows = (layout.part_rows if layout else None) or 1
    parts = [(needed[name].axis, needed[name].ranges)] if name in needed else []
    parts += [(band.tiling.axis, part) for band in index.bands.get(name, ()) for part in band.tiling.parts]
    return any(axis != 0 or any(end % rows for ends in ranges for end in ends) for axis, ranges in parts)


def saved_config(config: InferenceConfig, index: SavedIndex) -> InferenceConfig:
    """Return `config` completed by the dtype and format of the shards; ConfigError if it asks for others.

    A format that stores the same data (with other activations) is allowed.
    """
    asked = config.weight_format
    stored, quant = index.format_of_weights, index.quant
    by_name = config.module_formats and config.module_formats != quant.by_name
    other = asked is not None and (stored is None or as_stored(asked) != as_stored(stored))
    if other or by_name or (config.quant.enabled is False and quant.model_fields_set):
        setting = repr(asked) if asked else "formats by name" if by_name else "enabled=False"
        what = stored or quant.by_name or index.dtype
        raise ConfigError(f"quant: found {setting}, and the shards hold {what}; leave it out, or shard again")
    if asked is not None:
        quant = quant.model_copy(update={"format": asked})
    update: dict[str, Any] = {"quant": quant}
    if config.dtype is None or config.dtype == torch.int8:
        update["dtype"] = index.dtype
    return config.model_copy(update=update)


def as_stored(format: str) -> QuantFormat:
    """Return the format without its activation rounding, which shards do not depend on."""
    return replace(quant_format(format), activation_bits=16)


def _entries(step: Step, laid: Mapping[str, QuantizedExpertMatrix]) -> dict[str, dict[str, Any]]:
    """The step's entries in the index, by path."""
    paths = packed_paths(step)
    if not step.keeps_forward:
        matrices = {target: laid.get(f"{step.path}.{target.rpartition('.')[0]}") for target in step.formats}
        layouts = {target: matrix.layout for target, matrix in matrices.items() if matrix is not None}
        optional: dict[str, Any] = {"layouts": layouts} if layouts else {}
        optional |= {"ordered": sorted(step.ordered)} if step.ordered else {}
        return {path: {"kind": kind_of(step), "formats": step.formats, **optional} for path in paths}
    fills = [fill for fill, _ in step.made if fill.format]
    return {
        path: {"kind": kind_of_linear(step, fill), "formats": {"weight": fill.format}}
        | ({"ordered": ["weight"]} if fill.ordered else {})
        for path, fill in zip(paths, fills, strict=True)
    }


def kind_of(step: Step) -> str:
    """Digest of the meaning of all ranks' stored tensors: the whole shape, and how matrices are built."""
    alike = (replace(fill, cut=None, format=None, part=None) for fill, _ in step.made)
    fills = tuple(replace(fill, as_stored=False, ordered=False) for fill in alike)
    return digest_of(step.depth, step.whole or step.shape, fills)


def kind_of_linear(step: Step, fill: Fill) -> str:
    """Digest of one linear of a layer that ranks split, as a single rank would replace it."""
    assert step.whole is not None
    path = fill.target.removesuffix(".weight")
    part = next(matrix for matrix in step.whole.matrices if matrix.target == path)
    shape = LinearShape(part.inputs, part.outputs, part.bias, fill.transposed)
    return kind_of(Step(path, "Linear", shape, shape.fills, (), ""))
