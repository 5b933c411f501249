"""Matrices in codes in a live model that transformers loaded with another library's quantizer.

Their tensors go through the same forms as those of files. The modules that hold them give way to plain linears on meta,
whose weights then come from these tensors as from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infuse.architectures.foreign.quantized_elsewhere import is_quantized, quantized_by
from infuse.architectures.part import named
from infuse.ground.errors import CheckpointError
from infuse.weights.coded import decoded_as
from infuse.weights.coded.modules import (
    BITSANDBYTES,
    GPTQMODEL,
    Memory,
    UnreadableCodes,
    coded_by,
    file_metadata,
    file_tensors,
    gptqmodel_settings,
    is_rounded,
)
from infuse.weights.coded.quanto import Grouped
from infuse.weights.coded.settings import find_settings
from infuse.weights.lazy import FileTensor, InMemory, LazyTensor, Transposed
from infuse.weights.model_tensors import ModelTensors
from infuse.weights.names import placed
from infuse.weights.undo import put, take_out

# What transformers and compressed-tensors note on a model that they quantized.
_MARKS = (
    "is_quantized",
    "quantization_method",
    "hf_quantizer",
    "is_loaded_in_4bit",
    "is_loaded_in_8bit",
    "ct_decompress_hook",
)
_DECOMPRESSION = "ModelCompressor.add_decompress_hook"
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


@dataclass(frozen=True)
class CodesInModel:
    """`tensors`: the matrices in codes by name; `paths`: the modules that hold them; `library`: whose these are.

    `notes` say what is not kept as it is in memory. `beside_bytes`: the bytes of scales that are no parameters.
    """

    library: str
    tensors: Mapping[str, LazyTensor]
    paths: tuple[str, ...]
    notes: tuple[str, ...]
    beside_bytes: int

    def in_plain_linears(self, model: nn.Module, undo: ExitStack) -> ModelTensors:
        """Put plain linears on meta in the modules' places, and return all tensors of `model`.

        The library's marks and hooks are taken off. Closing `undo` restores all.
        """
        holders = [(named(path, name), holder, name) for path, holder in model.named_modules(remove_duplicate=False)
                   for name in holder._modules]  # fmt: skip
        made = {id(module): _plain_linear(module) for module in map(model.get_submodule, self.paths)}
        turned: set[str] = set()
        for path, holder, name in holders:
            plain = made.get(id(holder._modules[name]))
            if plain is not None:
                put(undo, holder._modules, name, plain)
                turned |= set() if type(plain) is nn.Linear else {named(path, "weight")}
        for module in model.modules():
            _unmark(module, undo)
        tensors: dict[str, LazyTensor] = {}
        for name, tensor in placed(model).items():
            tensors[name] = self.tensors[name] if tensor.is_meta else InMemory(tensor.detach())
            if name in turned:
                tensors[name] = Transposed(tensors[name])
        return ModelTensors(None, tensors, self.notes)


def codes_in(model: nn.Module) -> CodesInModel | str | None:
    """Find the matrices that another library holds in codes in a live `model`, which stays as it is.

    A string says why they cannot be read; None: nothing is quantized, or by a library whose modules are never read.
    """
    modules = list(model.named_modules(remove_duplicate=False))
    coded = {path: (library, module) for path, module in modules if (library := coded_by(module)) is not None}
    if not coded or quantized_by(model) is None:
        return None
    ids = {id(module) for _, module in coded.values()}
    for path, module in modules:
        if type(module).__module__.partition(".")[0] == "peft":
            return f"{path or 'the model'} is peft's, which adapts quantized linears itself"
        if id(module) not in ids and is_quantized(module):
            return f"{path} ({type(module).__name__}) is quantized, too, and not read"
    if any(parameter.is_meta for parameter in model.parameters()):
        return "parameters are on meta"
    try:
        raw = {name: one for path, (_, module) in coded.items() for name, one in file_tensors(path, module).items()}
        told = {name: text for path, (_, one) in coded.items() for name, text in file_metadata(path, one).items()}
        file = Memory(raw, metadata=told)
        settings = find_settings((), getattr(getattr(model, "config", None), "quantization_config", None))
        if held := [module for library, module in coded.values() if library == GPTQMODEL]:
            settings = gptqmodel_settings(held, settings)
        found = decoded_as("the model in memory", {name: FileTensor(file, name) for name in raw}, settings)
    except (UnreadableCodes, CheckpointError) as error:
        return str(error)
    tensors = dict(found.tensors)
    for path, (_, module) in coded.items():
        matrix, shape = tensors.get(f"{path}.weight"), (module.out_features, module.in_features)
        shaped = matrix.in_shape(shape) if isinstance(matrix, Grouped) else matrix
        if matrix is not None and (shaped is None or shaped.shape != shape):
            return f"{path} has codes of {matrix.shape} for a linear of {shape}"
        if shaped is not None:
            tensors[f"{path}.weight"] = shaped
    if lost := [path for path in coded if f"{path}.weight" not in tensors]:
        return f"{lost[0]} has no weights in codes"
    title = " and ".join(dict.fromkeys(library for library, _ in coded.values()))
    notes = [
        f"{len(coded)} linears of {title} are taken in their codes; proofs compare with the values of these codes in "
        f"plain linears, as {title} itself may round scales, values or activations when it runs"
    ]
    rounded = sum(is_rounded(module) for library, module in coded.values() if library == BITSANDBYTES)
    if rounded:
        notes.append(f"bitsandbytes: an earlier forward has rounded the scales of {rounded} matrices to bfloat16")
    beside = [one for name, one in raw.items() if not name.endswith((".weight", ".weight_packed"))]
    sizes = [torch.Size(one.shape).numel() * one.dtype.itemsize for one in beside if title == BITSANDBYTES]
    return CodesInModel(title, tensors, tuple(coded), (*notes, *found.notes), sum(sizes))


def _plain_linear(module: Any) -> nn.Module:
    """A linear on meta with this one's sizes, bias and hooks. Of a class of [in, out] weights if it was made of one."""
    source: Any = getattr(module, "source_cls", nn.Linear)  # transformers notes it
    of_conv1d = getattr(source, "__name__", "") == "Conv1D"
    with torch.device("meta"):
        if of_conv1d:
            plain: Any = source(module.out_features, module.in_features)
        else:
            plain = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
    bias = module.bias
    if bias is not None and not isinstance(bias, nn.Parameter):  # gptqmodel has a buffer
        bias = nn.Parameter(bias, requires_grad=False)
    plain._parameters["bias"] = bias
    for hooks in _HOOKS:
        vars(plain)[hooks] = vars(module)[hooks]
    plain._is_hf_initialized = True
    return plain.train(module.training)


def _unmark(module: nn.Module, undo: ExitStack) -> None:
    """Take off what tells transformers that a model is quantized, and the hook that would decompress it."""
    for mark in _MARKS:
        take_out(undo, vars(module), mark)
    config = vars(module).get("config")
    if config is not None and hasattr(config, "__dict__"):
        take_out(undo, vars(config), "quantization_config")
    for key, hook in list(module._forward_pre_hooks.items()):
        if getattr(hook, "__qualname__", "").startswith(_DECOMPRESSION):
            take_out(undo, module._forward_pre_hooks, key)
