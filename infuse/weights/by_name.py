"""Tensors of replaced layers by their names in the state dict, which are no paths of attributes any more."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from infuse.ground.instance_method import InstanceMethod
from infuse.weights.state import original_of


def find_by_name(model: nn.Module) -> None:
    """Let get_parameter and get_buffer of `model` find the tensors that its layers had before they were replaced.

    Reading and writing them reads and writes the layers' weights.
    """
    for method in ("get_parameter", "get_buffer"):
        setattr(model, method, InstanceMethod(partial(_found, method), model, method))


def _found(method: str, model: nn.Module, target: str) -> Tensor:
    try:
        return getattr(type(model), method)(model, target)
    except AttributeError:
        tensor = _of_original(model, target)
        if tensor is None or isinstance(tensor, nn.Parameter) != (method == "get_parameter"):
            raise
        return tensor


def _of_original(model: nn.Module, name: str) -> Tensor | None:
    """Return the tensor `name`, from the replaced module on its path; None if there is none."""
    module: nn.Module | None = model
    while module is not None and name:
        original = original_of(module)
        if original is not None and name in original.shapes:
            return original.tensor(module, name)
        child, _, name = name.partition(".")
        module = module._modules.get(child)
    return None
