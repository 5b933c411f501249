"""PEFT adapters: find them, find the modules they wrap, and refuse merges into quantized weights.

PEFT is not imported: its classes are recognized by module name.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from infuse.ground.errors import WAY_BACK, UnsupportedCall
from infuse.ground.instance_method import InstanceMethod

_OWN = ("base_model", "model", "base_layer", "original_module")  # children of PEFT modules that belong to the user
_MERGES = ("merge", "unmerge")


def is_adapter(module: nn.Module) -> bool:
    """Whether the module's class comes from PEFT: a wrapper of a layer or model, or a part of an adapter."""
    return any(cls.__module__.partition(".")[0] == "peft" for cls in type(module).__mro__)


def adapter_parts(module: nn.Module) -> tuple[str, ...]:
    """Names of a PEFT module's children that belong to adapters; () for any other module."""
    return tuple(name for name, _ in module.named_children() if name not in _OWN) if is_adapter(module) else ()


def adapted(module: nn.Module, path: str = "") -> list[str]:
    """Paths of the outermost PEFT modules inside `module`; `path` is its own."""
    paths = []
    for name, child in module.named_children():
        where = f"{path}.{name}" if path else name
        paths += [where] if is_adapter(child) else adapted(child, where)
    return paths


def adapter_notes(model: nn.Module) -> list[str]:
    """Return a note for the plan if the model has adapters."""
    there = any(is_adapter(module) for module in model.modules())
    return ["adapters (peft) stay as they are: what gets kernels and formats are their base layers"] if there else []


def base_path(model: nn.Module, path: str) -> str:
    """Follow PEFT wrappers from `path` to the user's own module and return its path."""
    module = model.get_submodule(path)
    while is_adapter(module):
        inner = next((name for name in ("base_layer", "original_module") if name in module._modules), None)
        if inner is None:
            return path
        path, module = f"{path}.{inner}", module.get_submodule(inner)
    return path


def merging_refused(module: nn.Module, formats: Mapping[str, str]) -> dict[str, Any]:
    """Replacements for `merge` and `unmerge` that raise UnsupportedCall.

    Empty unless `module` is an adapter and its base layer is now quantized in one of `formats`.
    """
    if not formats or not is_adapter(module):
        return {}
    format = next(iter(formats.values()))
    names = [name for name in _MERGES if hasattr(module, name)]
    return {name: InstanceMethod(partial(_refuse, name, format), module, name) for name in names}


def _refuse(name: str, format: str, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    raise UnsupportedCall(
        f"{name}: this adapter's base layer is quantized ({format}), and nothing can be added to its weights: "
        f"merge the adapters before init_inference ({WAY_BACK}), or leave `quant` out; adapters that are not merged "
        "work, and unload() takes them off"
    )
