"""Detect models that another library quantized or offloaded, by class names: no such library is imported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

# Top-level package of a class → name of the library. Modules and parameters of these classes hold quantized weights.
QUANTIZERS = {
    "torchao": "torchao", "bitsandbytes": "bitsandbytes", "gptqmodel": "GPTQ", "auto_gptq": "GPTQ", "awq": "AWQ",
    "hqq": "HQQ", "compressed_tensors": "compressed-tensors", "optimum": "quanto", "quanto": "quanto", "aqlm": "AQLM",
    "eetq": "EETQ", "auto_round": "AutoRound", "vptq": "VPTQ", "modelopt": "ModelOpt",
}  # fmt: skip
_MXFP4 = "Mxfp4GptOssExperts"  # transformers' class, in the layout of its own kernels
_INTEGRATIONS = "transformers.integrations"
_BITS = {"Linear8bitLt": ", 8 bits", "Linear4bit": ", 4 bits"}


def quantized_by(model: nn.Module) -> str | None:
    """The library that quantized the model or a part of it; None if none did."""
    library = next(_evidence(model), None)
    if library is None and getattr(model, "is_quantized", False) is True:  # set by transformers when it loads a model
        config: Any = getattr(getattr(model, "config", None), "quantization_config", None)
        told = config if isinstance(config, dict) else getattr(config, "__dict__", {})
        method = told.get("quant_method") or getattr(model, "quantization_method", None)
        method = str(getattr(method, "value", method) or "another library")
        if (method == "gguf" or told.get("dequantize")) and _is_dense(model):
            return None
        return method
    return library


def is_quantized(module: nn.Module) -> bool:
    """Whether the module itself, apart from those in it, holds weights as a quantizer's class or tensors do."""
    of_transformers = type(module).__module__.startswith(_INTEGRATIONS) and bool(module._parameters or module._buffers)
    return of_transformers or next(_evidence_of(module), None) is not None


def _evidence(model: nn.Module) -> Iterator[str]:
    for module in model.modules():
        yield from _evidence_of(module)


def _evidence_of(module: nn.Module) -> Iterator[str]:
    cls = type(module)
    if cls.__module__.startswith("torch.ao.nn."):
        yield "torch.ao"
    if cls.__name__ == _MXFP4:
        yield 'transformers in mxfp4 (infuse keeps these codes: with the model on meta, and checkpoint="FOLDER")'
    if isinstance(module, nn.Module) and (library := QUANTIZERS.get(cls.__module__.partition(".")[0])):
        yield f"{library}{_BITS.get(cls.__name__, '')}"
    for parameter in module._parameters.values():
        for tensor in () if parameter is None else (parameter, parameter.data):
            if library := QUANTIZERS.get(type(tensor).__module__.partition(".")[0]):
                yield library


def _is_dense(model: nn.Module) -> bool:
    """Whether all parameters are plain floating numbers of 16 bits or more, in classes that are not a quantizer's."""
    holders = [module for module in model.modules() if module._parameters or module._buffers]
    plain = all(p.is_floating_point() and p.itemsize > 1 for p in model.parameters())
    return plain and not any(type(module).__module__.startswith(_INTEGRATIONS) for module in holders)


def offloaded(model: nn.Module) -> bool:
    """Whether accelerate keeps weights of the model elsewhere and loads each before it is used."""
    hooks = [vars(module).get("_hf_hook") for module in model.modules()]
    inner = [part for hook in hooks for part in getattr(hook, "hooks", (hook,))]  # unpacks a SequentialHook
    return any(getattr(hook, "offload", False) for hook in inner)
