"""Quantized forms of checkpoints: turn their raw tensors into matrices that keep their codes.

This comes right after the files are opened. A matrix `X.weight` then takes the place of `X.qweight`, `X.scales` and so
on, and everything that follows (names, foreign layouts, merging) sees one lazy tensor with `coded` set.

A form is one file and one entry in FORMS.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from infuse.ground.errors import CheckpointError
from infuse.weights.coded.awq import awq
from infuse.weights.coded.bitsandbytes import bitsandbytes
from infuse.weights.coded.compressed import compressed
from infuse.weights.coded.form import Form, Found, Raw
from infuse.weights.coded.fp8 import fp8
from infuse.weights.coded.gptq import gptq
from infuse.weights.coded.modelopt import modelopt
from infuse.weights.coded.quanto import quanto
from infuse.weights.coded.settings import METHODS, Settings, find_settings
from infuse.weights.coded.torchao import torchao
from infuse.weights.lazy import FileTensor, LazyTensor
from infuse.weights.plain_values import dequantized

FORMS: tuple[Form, ...] = (gptq, awq, compressed, fp8, modelopt, bitsandbytes, torchao, quanto)

_FOREIGN = ("mxfp4",)  # a foreign layout, and no form of ours
_READ = (*METHODS, *_FOREIGN)
# Names that only quantized forms have, of integers: without a config they cannot be read.
_TELLTALE = ("qweight", "weight_packed", "qzeros")
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_CODES = (torch.int8, torch.uint8, torch.int32, *_FP8)


@dataclass(frozen=True)
class Decoded:
    """The matrices that coded forms make: `tensors` by checkpoint name, `titles` of their forms, and the names `used`.

    `notes` say what is not kept as it is in the file. `hint`: why other tensors look quantized but are not read.
    """

    tensors: Mapping[str, LazyTensor] = field(default_factory=dict)
    titles: Mapping[str, str] = field(default_factory=dict)
    used: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    hint: str | None = None


def decoded(what: str, tensors: Mapping[str, FileTensor], of_model: Any = None) -> Decoded:
    """Run all forms over the tensors of files. `what`: the checkpoint, for errors; `of_model`: its own config, if any.

    CheckpointError lists all that is missing, of another shape or dtype, or against the config, and what is refused.
    """
    paths = [tensor.file.path for tensor in tensors.values()]
    return decoded_as(what, tensors, find_settings(paths, of_model))


def decoded_as(what: str, tensors: Mapping[str, FileTensor], settings: Settings | None) -> Decoded:
    """`decoded`, with the `settings` that a config was found to have."""
    raw, results = Raw(tensors, settings), list[Found]()
    for form in FORMS:
        result = form(raw)
        results.append(result)
        raw = Raw({name: one for name, one in raw.tensors.items() if name not in result.used}, settings)
    faults = [f"{result.title}: {fault}" for result in results for fault in result.faults]
    made = {name: result.title for result in results for name in result.tensors}
    faults = faults or _without_scale(raw)
    if twice := sorted(raw.tensors.keys() & made.keys()):
        faults.append(f"stored both as plain values and in codes: {', '.join(twice)}")
    if faults:
        lines = dict.fromkeys(faults)
        count = "1 fault" if len(lines) == 1 else f"{len(lines)} faults"
        raise CheckpointError(f"{what}: cannot be read ({count}):\n  " + "\n  ".join(lines))
    notes = [
        f"{result.title}: {len(names)} {'tensor' if len(names) == 1 else 'tensors'}, e.g. {names[0]}: {note}"
        for result in results
        for note, names in result.notes.items()
    ]
    notes += _dequantized(results, tensors)
    if settings is not None and not made and settings.method not in _FOREIGN:
        what = "but no tensor is stored in it"
        if settings.method not in METHODS:
            what = "which is not applied; the weights are taken as plain values"
        notes.append(f"{settings.origin} names {settings.method}, {what}")
    every = {name: tensor for result in results for name, tensor in result.tensors.items()}
    used = frozenset().union(*(result.used for result in results))
    return Decoded(every, made, used, tuple(notes), _hint(raw))


def _dequantized(results: Iterable[Found], files: Mapping[str, FileTensor]) -> Iterator[str]:
    """Yield a note for each reason why matrices become plain values."""
    for result in results:
        if not result.dequantized:
            continue
        sizes = {name: math.prod(files[name].shape) * files[name].dtype.itemsize for name in result.used}
        by_module: dict[str, int] = {}
        for name, size in sizes.items():
            path = name.rpartition(".")[0]
            by_module[path] = by_module.get(path, 0) + size
        for why, names in result.dequantized.items():
            tensors = [result.tensors[name] for name in names]
            stored = sum(_stored_bytes(*one, sizes, by_module) for one in zip(names, tensors, strict=True))
            values = sum(math.prod(tensor.shape) for tensor in tensors)
            yield f"{result.title}: {dequantized(names, why, values, stored)}"


def _stored_bytes(name: str, tensor: LazyTensor, sizes: Mapping[str, int], by_module: Mapping[str, int]) -> int:
    """Bytes in the files of a matrix, or of a tensor of experts, with its scales.

    `sizes`: of the tensors that its form has used, `by_module`: their sums.
    """
    if len(tensor.shape) > 2:
        return sum(size for one, size in sizes.items() if one == name or one.startswith(f"{name}_"))
    # A form's tensors lie beside the weight or, as X.weight.absmax and X.weight._data._data, below it.
    paths = {name.rpartition(".")[0], name, f"{name}._data"}
    return sum(by_module.get(path, 0) for path in paths)


def _without_scale(raw: Raw) -> list[str]:
    """Faults of fp8 weights that no form has taken: their values would be off by their scales."""
    settings, faults = raw.settings, []
    ask = 'put the config.json with "quantization_config" beside the files'
    if settings is not None:
        ask = f"{settings.origin} names {settings.method}"
    for name, tensor in raw.tensors.items():
        path, _, leaf = name.rpartition(".")
        if tensor.dtype not in _FP8:
            continue
        what = f"{tensor.file.path}: {name} is {str(tensor.dtype).removeprefix('torch.')}, and "
        scales = [one for one in raw.by_path[path] if _scales(one, leaf)]
        if scales:
            faults.append(f"{what}{path}.{scales[0]} beside it is not read as its scale; {ask}")
        elif settings is not None:
            faults.append(f"{what}its scale is missing")
    return faults


def _scales(leaf: str, of: str) -> bool:
    """Whether a tensor of a module, by its name, may be the scale of another."""
    return leaf != of and "scale" in leaf and (of == "weight" or leaf.startswith(f"{of}_"))


def _hint(raw: Raw) -> str | None:
    """Why tensors that no form has taken look quantized: a method that is not read, or no config."""
    settings = raw.settings
    codes = (name for name, tensor in raw.tensors.items() if tensor.dtype in _CODES)
    if settings is not None and settings.method not in _READ and (code := next(codes, None)):
        possible = ", ".join(_READ)
        return f"{settings.origin}: the method {settings.method!r} of {code} is not read; possible: {possible}"
    told = next((name for name in codes if name.rpartition(".")[2] in _TELLTALE), None)
    if settings is not None or told is None:
        return None
    what = f"{raw.tensors[told].file.path}: {told} is quantized, but no config says how"
    return f'{what}; put the config.json with "quantization_config" beside the files'
