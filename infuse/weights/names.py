"""Match the names in a checkpoint to the names in a model, and report all mismatches in one error.

Prefixes and renamed parts are resolved as in transformers, with its own renaming table if it has one for the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from infuse.architectures import bind_any, specs_for
from infuse.errors import CheckpointError, SpecMismatch
from infuse.weights.checkpoint import Checkpoint, Joined, in_words, same_values
from infuse.weights.converted import Converted, converted
from infuse.weights.merged import Merged, merged
from infuse.weights.microscaled import Microscaled, microscaled
from infuse.weights.pieces import Packed, Shape, packed_qkv
from infuse.weights.reader import Slices
from infuse.weights.saved_shards import SavedShards

_FORMER_BUFFERS = ("rotary_emb.inv_freq", ".position_ids", ".masked_bias")  # older models saved them in each layer
TensorSource = Checkpoint | SavedShards


def held(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and persistent buffers by every name; tied ones have several."""
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}


def placed(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and persistent buffers by path. (The state dict of a replaced model uses the original's names.)"""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and leaf not in module._non_persistent_buffers_set:
                found[f"{path}.{leaf}" if path else leaf] = tensor
    return found


@dataclass
class ModelReader:
    """Read a checkpoint by the model's names. `notes` reports tensors unknown to the model and copies that differ."""

    checkpoint: TensorSource
    tensors: dict[str, Joined | Merged | Converted | Microscaled] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def read(self, name: str, part: Slices = ()) -> Tensor:
        """Read the tensor `name` of the model, or `part` of it; only the bytes of the part are read."""
        return self.tensors[name].read(part)


def model_reader(
    model: nn.Module, checkpoint: TensorSource, without: Callable[[str], bool] = lambda name: False
) -> ModelReader:
    """Return the reader of `model`'s values; CheckpointError lists all missing, unexpected or misshaped keys.

    Names for which `without` returns True are ignored on both sides. Buffers may be missing if transformers allows it.
    """
    expected = {name: tensor for name, tensor in held(model).items() if not without(name)}
    names, left = _matched(model, [name for name in checkpoint.pieces if not without(name)], expected)
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items() if name not in names and tensor.dim() == 3}
    of_experts, left, misshaped = _of_experts(model, checkpoint, left, shapes) if shapes else ({}, left, [])
    conversions, left, more = _converted(model, checkpoint, names, left, expected)
    misshaped += more
    known = {*of_experts, *conversions, *(line.partition(":")[0] for line in misshaped)}
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in expected.items():
        if name not in known:
            by_tensor.setdefault(id(tensor), []).append(name)
    missing: list[str] = []
    optional = _patterns(model, "_keys_to_ignore_on_load_missing")
    packed = packings(model) if checkpoint.in_pieces else {}
    reader = ModelReader(checkpoint, {**of_experts, **conversions})
    drifted: list[str] = []
    for tied in by_tensor.values():
        found = [name for name in tied if name in names]
        if not found and (isinstance(expected[tied[0]], nn.Parameter) or not optional(tied[0])):
            missing.append(" = ".join(tied))
        if not found:
            continue
        wanted = tuple(expected[tied[0]].shape)
        for name in (*found, *(name for name in tied if name not in found)):
            stored = names.setdefault(name, names[found[0]])
            joined = checkpoint.joined(stored, wanted, packed.get(name))
            pieces, needed = checkpoint.pieces[stored], expected[tied[0]].dtype
            if joined is None and name in found:
                misshaped.append(f"{name}: {in_words(pieces.shapes)}, the model has {wanted}")
            elif name in found and _kind(pieces.dtype) != _kind(needed):
                misshaped.append(f"{name}: {pieces.dtype}, the model has {needed}")
            elif name in found and not pieces.are_copies(wanted):
                drifted.append(stored)
            if joined is not None:
                reader.tensors[name] = joined
        for other in found[1:]:
            one, two = reader.tensors.get(found[0]), reader.tensors.get(other)
            if one and two and not (checkpoint.holds_replaced or same_values(one.shape, one.read, two.read)):
                what = f"the model ties it to {found[0]}, the checkpoint has other values for it"
                misshaped.append(f"{other}: {what}; untie it in the model's config")
    foreign, harmless = _judged(model, left)
    if not checkpoint.told:
        misshaped += [f"{name}: several files have it, with other values" for name in drifted]
    _raise_all(checkpoint.form, missing, foreign, misshaped)
    if harmless:
        what = f"the checkpoint has {len(harmless)} tensors that the model has no place for"
        reader.notes += (f"{what}: {', '.join(harmless)}",)
    if drifted:
        what = f"{len(drifted)} tensors that ranks saved whole differ between them"
        reader.notes += (f"{what}; the first rank's are taken: {', '.join(drifted)}",)
    return reader


def _of_experts(
    model: nn.Module, checkpoint: TensorSource, names: list[str], wanted: Mapping[str, Shape]
) -> tuple[dict[str, Merged | Microscaled], list[str], list[str]]:
    """Tensors of all experts that the checkpoint has in other forms, the names that are left, and what does not fit."""
    renamed, prefix = _renaming(model), getattr(model, "base_model_prefix", "")
    in_blocks, left, unfit = microscaled(checkpoint, names, lambda name: _variants(renamed(name), prefix), wanted)
    in_many, left, misshaped = merged(checkpoint, left, _merging(model, wanted), wanted)
    return {**in_blocks, **in_many}, left, [*unfit, *misshaped]


def _kind(dtype: torch.dtype) -> str:
    return "floating" if dtype.is_floating_point else "complex" if dtype.is_complex else "integer"


def packings(model: nn.Module) -> dict[str, Packed]:
    """Packed matrices (q, k and v; gate and up) by their names in the model, as the specs declare them."""
    found: dict[str, Packed] = {}

    def visit(module: nn.Module, path: str, config: Any) -> None:
        specs = specs_for(module)
        if not specs:
            config = getattr(module, "config", config)
            for name, child in module.named_children():
                visit(child, f"{path}{name}.", config)
            return
        try:
            bound = bind_any(specs, module, config)
        except SpecMismatch:
            return
        lying = {parameter.target: parameter.extents for parameter in bound.shape.parameters}
        for fill in bound.fills:
            extents = lying.get(fill.target, ())
            if fill.heads is not None:
                if packed := packed_qkv(fill.packing, fill.heads):
                    found[path + fill.sources[0]] = packed
            elif len(fill.sources) == 1 and len(extents) > 1:
                found[path + fill.sources[0]] = Packed(tuple(extent.length for extent in extents))

    visit(model, "", None)
    return found


def _matched(model: nn.Module, given: list[str], expected: Mapping[str, Tensor]) -> tuple[dict[str, str], list[str]]:
    """Map names in the model to names in the checkpoint, and list the checkpoint names that match nothing."""
    names = {name: name for name in given if name in expected}
    renamed, prefix, left = _renaming(model), getattr(model, "base_model_prefix", ""), []
    for name in given:
        if name in names:
            continue
        places = [place for place in _variants(renamed(name), prefix) if place in expected and place not in names]
        if places:
            names[places[0]] = name
        else:
            left.append(name)
    return names, left


def _variants(name: str, prefix: str) -> Iterator[str]:
    """Yield the name with and without wrapper prefixes: `module.` (parallel training) and the base model's prefix."""
    for bare in (name, name.removeprefix("module.")):
        yield bare
        if prefix:
            yield f"{prefix}.{bare}"
            yield bare.removeprefix(f"{prefix}.")


def _renaming(model: nn.Module) -> Callable[[str], str]:
    """Return transformers' renaming of names from older checkpoints."""
    if not hasattr(model, "base_model_prefix"):
        return lambda name: name
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    known: Any = model
    renamings = [one for one in get_model_conversion_mapping(known) if isinstance(one, WeightRenaming)]
    return lambda name: rename_source_key(name, renamings, [])[0]


def _merging(model: nn.Module, expected: Mapping[str, Any]) -> Callable[[str], tuple[str, int] | None]:
    """Return a function: the name of an expert's matrix → the model's tensor of all experts, and its place in a row.

    The function returns None for other names, and where transformers does more than to stack and concatenate.
    """
    if not hasattr(model, "base_model_prefix"):
        return lambda name: None
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        Concatenate,
        MergeModulelist,
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    known: Any = model
    mapping = get_model_conversion_mapping(known)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    steps = ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])
    stacking = [one for one in converters if [(type(op), getattr(op, "dim", 0)) for op in one.operations] in steps]
    places = {pattern: at for one in stacking for at, pattern in enumerate(one.source_patterns)}

    def place(name: str) -> tuple[str, int] | None:
        target, pattern = rename_source_key(name, renamings, converters)
        if pattern not in places:
            return None
        variants = [one for one in _variants(target, known.base_model_prefix) if one in expected]
        return (variants[0], places[pattern]) if variants else None

    return place


def _converted(
    model: nn.Module, checkpoint: TensorSource, names: dict[str, str], left: list[str], expected: Mapping[str, Tensor]
) -> tuple[dict[str, Converted], list[str], list[str]]:
    """Tensors that transformers' other converters make, the names that are left, and what does not fit.

    The converters take names that are left, and those in `names` whose tensor has another shape than the model's: these
    are removed from `names`.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    unlike = {name for name, stored in names.items() if shapes[name] not in checkpoint.pieces[stored].shapes}
    if not hasattr(model, "base_model_prefix") or checkpoint.in_pieces or not (left or unlike):
        return {}, left, []
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    known: Any = model
    mapping = get_model_conversion_mapping(known)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}

    def place(name: str) -> tuple[Any, str, str] | None:
        target, pattern = rename_source_key(name, renamings, converters)
        if pattern is None:
            return None
        variants = [one for one in _variants(target, known.base_model_prefix) if one in expected]
        return (by_pattern[pattern], pattern, variants[0]) if variants else None

    given = [*left, *(names[name] for name in unlike)]
    made, used, misshaped = converted(model, checkpoint, given, place, shapes)
    for name in unlike:
        if names[name] in used:
            del names[name]
    return made, [name for name in left if name not in used], misshaped


def _patterns(model: nn.Module, attribute: str) -> Callable[[str], bool]:
    patterns = [re.compile(text) for text in getattr(model, attribute, None) or ()]
    return lambda name: any(pattern.search(name) for pattern in patterns)


def _judged(model: nn.Module, left: list[str]) -> tuple[list[str], list[str]]:
    """Sort the unmatched names into those of another model and those of heads that this class does not have.

    A name inside a list of layers implies another model: more layers, or layers with other parts. Buffers that are
    recomputed belong to neither group.
    """
    prefix = getattr(model, "base_model_prefix", "")
    lists = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, nn.ModuleList) and path)
    computed = {name for name, _ in model.named_buffers()}
    ignored, renamed = _patterns(model, "_keys_to_ignore_on_load_unexpected"), _renaming(model)
    foreign: list[str] = []
    harmless: list[str] = []
    for name in left:
        variants = set(_variants(renamed(name), prefix))
        if ignored(name) or variants & computed or name.endswith(_FORMER_BUFFERS):
            continue
        (foreign if any(variant.startswith(lists) for variant in variants) else harmless).append(name)
    return foreign, harmless


def _raise_all(form: str, missing: list[str], unexpected: list[str], misshaped: list[str]) -> None:
    kinds = {"missing": missing, "unexpected": unexpected, "misshaped": misshaped}
    lines = [f"  {kind}  {line}" for kind, found in kinds.items() for line in found]
    if lines:
        counts = ", ".join(f"{len(found)} {kind}" for kind, found in kinds.items() if found)
        if any(name.endswith((".attn_qkvw", ".inter_w")) for name in unexpected):
            lines.append("these are layers as DeepSpeed replaces them; give the checkpoint that they were made from")
        raise CheckpointError(f"the checkpoint ({form}) is not this model's: {counts}\n" + "\n".join(lines))
